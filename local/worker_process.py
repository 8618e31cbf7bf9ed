"""Runs a worker in its own process on this machine, for trying and measuring without any setup."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from penstock.local.processes import running
from penstock.protocol import keys
from penstock.protocol.redis.connection import connect

DEMO_SIZES: Mapping[str, Any] = {"max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520}
"""Settings for the demo model, so small that there is little to compile: the first start takes seconds."""

_POLL_S = 0.1


class WorkerEnded(Exception):
    """The worker's process ended before it could be used."""


def local_worker(
    url: str, settings: Mapping[str, Any]
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Runs `penstock worker` with `settings`. It ends with the block, or if this process is killed."""
    return running("worker", {**settings, "redis_url": url})


async def wait_joined(process: asyncio.subprocess.Process, url: str, queue: str, name: str) -> None:
    """Waits until the worker serves its queue, its model loaded and warmed up.

    Raises:
        WorkerEnded: the worker's process ended before that.
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
