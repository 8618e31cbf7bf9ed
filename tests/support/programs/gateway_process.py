"""Gateways as separate processes, for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.local.embedded import dies_with_parent
from penstock.worker.settings_loading import flag
from tests.support.patience import WAIT_S
from tests.support.processes import ended


class GatewayProcess:
    """`penstock gateway` while the `async with` block lasts, on the same port in all its lives."""

    def __init__(self, redis_url: str, log: Path, **settings: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        values = {"redis_url": redis_url, "port": self.port, "log_format": "json", **settings}
        flags = [part for name, value in values.items() for part in (flag(name), str(value))]
        self._command = [*dies_with_parent(), sys.executable, "-m", "penstock", "gateway", *flags]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def memory_mib(self) -> float:
        assert self._process is not None
        num_pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def start(self) -> None:
        """Starts the process; returns once it accepts connections."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        async with asyncio.timeout(WAIT_S):
            while not await self._accepts():
                assert self._process.returncode is None, self._log.read_text()[-2000:]
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """Kills the process, which may have ended before."""
        assert self._process is not None
        await ended(self._process)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
            await writer.wait_closed()
            return True
        return False
