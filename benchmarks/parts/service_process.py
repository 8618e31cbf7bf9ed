"""The parts of a measurement of the service: a worker in this process, clients in others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from redis import Redis

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.connection import connect
from penstock.worker.config import WorkerConfig
from penstock.worker.service import Model, WorkerService
from penstock.worker.settings_loading import flag

QUEUE = "bench"


@contextlib.asynccontextmanager
async def worker_in_process(url: str, model: Model, **config: Any) -> AsyncIterator[WorkerService]:
    """Runs a worker on this event loop, from its joining to its drain."""
    values = {"queue": QUEUE, "health_port": None, "drain_timeout_s": 1.0, **config}
    service = WorkerService(WorkerConfig(**values), url, lambda _: model)
    task = asyncio.create_task(service.run())
    try:
        await until(lambda: service.readiness.is_ready or task.done())
        yield service
    finally:
        service.request_drain()
        await task


async def until(holds: Callable[[], bool]) -> None:
    """Waits, looking every 5 ms."""
    while not holds():  # noqa: ASYNC110  nothing notifies
        await asyncio.sleep(0.005)


async def bench_client(url: str, **options: Any) -> dict[str, Any]:
    """Runs `penstock bench serve` in a process; returns its only run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        flags = [part for name, value in options.items() for part in (flag(name), str(value))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "bench", "serve", "--redis-url", url, "--queue", QUEUE,
            "--json", str(path), *flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the client ended with status {process.returncode}: {errors.decode()}")
        found = json.loads(path.read_text())
    run: dict[str, Any] = found["runs"][0]
    if run["num_failed"]:
        raise RuntimeError(f"{run['num_failed']} requests failed: {found['errors'][:3]}")
    return run


class ServerCosts:
    """A server's costs since this object was made."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._redis = Redis.from_url(server.url, protocol=2)
        self._redis.config_resetstat()
        self._pid = server.pid
        self._cpu_s = process_cpu_s(self._pid)
        self._since_s = time.perf_counter()

    def calls(self, command: str) -> int:
        stats: Any = self._redis.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))

    @property
    def cpu_s(self) -> float:
        return process_cpu_s(self._pid) - self._cpu_s

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since_s


def process_cpu_s(pid: int) -> float:
    """Returns the processor seconds of a process so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def preload(url: str, count: int, max_tokens: int) -> None:
    """Enqueues requests whose replies nobody reads."""
    redis: Any = connect(url, decode=False)
    pipeline = redis.pipeline(transaction=False)
    for _ in range(count):
        pipeline.xadd(f"penstock:{{{QUEUE}}}:requests", {"prompt": "hello", "max_tokens": str(max_tokens)})
    await pipeline.execute()
    await redis.aclose()
