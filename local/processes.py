"""Runs `penstock` in processes of its own on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from penstock.local.embedded import dies_with_parent
from penstock.worker.settings_loading import flag

STOP_TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def running(
    command: str, settings: Mapping[str, Any], *, stderr: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `penstock COMMAND` with `settings`. It ends with the block, or if this process is killed."""
    flags = [part for name, value in settings.items() for part in (flag(name), "none" if value is None else str(value))]
    process = await asyncio.create_subprocess_exec(
        *dies_with_parent(),
        sys.executable,
        "-m",
        "penstock",
        command,
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # this process handles Ctrl-C, and then stops the other
    )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
