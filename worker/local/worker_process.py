"""A worker as a process of its own on this machine, for trying and measuring with nothing set up before."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from redis.exceptions import RedisError

from penstock.producer import keys
from penstock.producer.redis.connection import connect
from penstock.worker.local.embedded import dies_with_parent
from penstock.worker.settings_loading import flag

STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


class WorkerEnded(Exception):
    """The worker's process ended before it could be used."""


@contextlib.asynccontextmanager
async def local_worker(url: str, settings: Mapping[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `penstock worker` with `settings`. It ends with the block, or if this process is killed."""
    values = {**settings, "redis_url": url}
    flags = [part for name, value in values.items() for part in (flag(name), "none" if value is None else str(value))]
    process = await asyncio.create_subprocess_exec(
        *dies_with_parent(),
        sys.executable,
        "-m",
        "penstock",
        "worker",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the worker
    )
    try:
        yield process
    finally:
        await _stop(process)


async def wait_joined(process: asyncio.subprocess.Process, url: str, queue: str, name: str) -> None:
    """Waits until the worker serves its queue, its model loaded and warmed up.

    Raises:
        WorkerEnded: it did not get so far.
    """
    redis = connect(url, decode=False)
    try:
        while process.returncode is None:
            with contextlib.suppress(RedisError):
                if await redis.zscore(keys.serving(queue), name) is not None:
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _POLL_S)
    finally:
        await redis.aclose()
    raise WorkerEnded(f"the worker ended with status {process.returncode} before it served its queue")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
