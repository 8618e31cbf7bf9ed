"""A server with paced workers around it, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.lanes.worker import PacedWorker
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect, ensure_group

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0


class Fleet:
    """Running workers, and a connection to their server."""

    def __init__(self, redis: RedisClient, processes: dict[str, BaseProcess]) -> None:
        self.redis = redis
        self._processes = processes

    def send(self, worker: str, number: signal.Signals) -> None:
        process = self._processes[worker]
        if process.pid is not None:
            os.kill(process.pid, number)

    def check(self) -> None:
        """Raises RuntimeError if a worker has ended without being killed."""
        for name, process in self._processes.items():
            if process.exitcode not in (None, -signal.SIGKILL):
                raise RuntimeError(f"worker {name} ended with status {process.exitcode}")


@contextlib.asynccontextmanager
async def running_fleet(workers: Sequence[PacedWorker]) -> AsyncIterator[Fleet]:
    """Runs a server and these workers; yields once all serve their queues."""
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        redis = connect(server.url, decode=False)
        for queue in {worker.queue for worker in workers}:
            await ensure_group(redis, queue)
        logs = {worker.name: Path(folder) / f"{worker.name}.log" for worker in workers}
        processes = {worker.name: worker.start(server.url, logs[worker.name]) for worker in workers}
        fleet = Fleet(redis, processes)
        try:
            await _until_all_serve(fleet, workers)
            yield fleet
        except BaseException:
            for name, log in logs.items():
                print(f"{name}: {log.read_text(errors='replace')[-2000:]}")
            raise
        finally:
            await asyncio.to_thread(_stop, processes)
            await redis.aclose()


async def _until_all_serve(fleet: Fleet, workers: Sequence[PacedWorker]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    for queue in {worker.queue for worker in workers}:
        count = sum(worker.queue == queue for worker in workers)
        while await fleet.redis.zcard(keys.serving(queue)) < count:
            fleet.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all of {count} workers served {queue} within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.05)


def _stop(processes: dict[str, BaseProcess]) -> None:
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        process.join(STOP_TIMEOUT_S)
        process.kill()
