"""Runs a gateway in its own process on this machine, for trying it without any setup."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from penstock.local.processes import running
from penstock.protocol.tasks import end_tasks

_SETTINGS = {"host": "127.0.0.1", "port": 0, "workers": 1, "log_format": "json", "log_level": "info"}


class GatewayEnded(Exception):
    """The gateway's process ended before it could be used. The message ends with its last words."""


@contextlib.asynccontextmanager
async def local_gateway(redis_url: str, **settings: Any) -> AsyncIterator[str]:
    """Runs `penstock gateway` on a free port and yields its URL. It ends with the block, or if this process is killed.

    Raises:
        GatewayEnded: it did not start.
    """
    settings = {**_SETTINGS, "redis_url": redis_url, **settings}
    async with running("gateway", settings, stderr=asyncio.subprocess.PIPE) as process:
        assert process.stderr is not None  # noqa: S101  it is a pipe
        url = await _listening(process.stderr)
        reading = asyncio.create_task(_drop(process.stderr))
        try:
            yield url
        finally:
            await end_tasks([reading])


async def _listening(lines: asyncio.StreamReader) -> str:
    """Reads the gateway's URL from its log."""
    last = "nothing"
    async for line in lines:
        last = line.decode(errors="replace").strip()
        with contextlib.suppress(ValueError):
            event = json.loads(last)
            if event["event"] == "listening":
                return str(event["url"])
    raise GatewayEnded(f"the gateway ended before it listened; it said last: {last[:500]}")


async def _drop(lines: asyncio.StreamReader) -> None:
    """Drops the log: a full pipe would block its writer."""
    while await lines.read(1 << 16):
        pass
