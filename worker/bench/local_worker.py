"""A worker as a process of its own, for measuring with nothing set up before."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from redis.exceptions import RedisError

from producer import keys
from producer.connection import connect
from worker.embedded import dies_with_parent
from worker.settings import flag

STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


class WorkerEnded(Exception):
    """The worker's process ended before it could be used."""


@contextlib.asynccontextmanager
async def local_worker(url: str, settings: Mapping[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `penstock worker` with `settings`, which name its `queue` and `name`, from when it has joined its queue.

    It ends with the block, and with this process, even one that was killed.

    Raises:
        WorkerEnded: it did not get as far as joining.
    """
    values = {**settings, "redis_url": url}
    flags = [part for name, value in values.items() for part in (flag(name), "none" if value is None else str(value))]
    process = await asyncio.create_subprocess_exec(
        *dies_with_parent(),
        sys.executable,
        "-m",
        "worker",
        "worker",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the worker
    )
    try:
        await _joined(process, url, keys.heartbeat(str(values["queue"]), str(values["name"])))
        yield process
    finally:
        await _stop(process)


async def _joined(process: asyncio.subprocess.Process, url: str, heartbeat: str) -> None:
    """Its heartbeat starts when its model is loaded and warmed up."""
    redis = connect(url, decode=False)
    try:
        while process.returncode is None:
            with contextlib.suppress(RedisError):
                if await redis.exists(heartbeat):
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _POLL_S)
    finally:
        await redis.aclose()
    raise WorkerEnded(f"the worker ended with status {process.returncode} before it had joined its queue")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
