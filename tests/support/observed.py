"""A worker and a gateway that have done some of everything, with the ports of their metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2 as httpx

from penstock.engine import EngineInfo
from penstock.engine.errors import InvalidRequest
from penstock.engine.stats import DeviceMemory, EngineStats, KindStats
from penstock.gateway.server import serving_metrics
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.service import WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, send

INFO = EngineInfo(1, "bfloat16", "bfloat16", 64, 4096, 4096, "gpu", "H100", 1, "pallas", "xla", None, 4096)


@dataclass(frozen=True, slots=True)
class Observed:
    """Ports of a worker's and a gateway's metrics, and the URL where the gateway takes requests."""

    worker_port: int
    gateway_port: int
    url: str

    async def pages(self) -> list[str]:
        """Scrapes the metrics of both."""
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            urls = [f"http://127.0.0.1:{port}/metrics" for port in (self.worker_port, self.gateway_port)]
            return [(await client.get(url)).raise_for_status().text for url in urls]


class _TwoKinds(FakeEngine):
    """An engine with two kinds of pages, as where layers differ in their KV heads."""

    def stats(self) -> EngineStats:
        return replace(super().stats(), kinds=(KindStats(80, 60, 10), KindStats(20, 20, 0)))


class _NoGrammars:
    def compile(self, source: str) -> Any:
        raise InvalidRequest("this engine follows none")


@asynccontextmanager
async def observed(redis_url: str) -> AsyncIterator[Observed]:
    """Serves the queue `q` with the fake engine, on a device that reports its memory as a GPU does."""
    memory = DeviceMemory(0, 2**30, 2**31, 2**32)
    model = replace(fake_model(_TwoKinds()), name="tiny", info=INFO, grammars=_NoGrammars(), memory=lambda: (memory,))
    config = WorkerConfig(**{**QUICK, "name": "w", "health_host": "127.0.0.1", "health_port": 0})
    service = WorkerService(config, redis_url, lambda _: model)
    task = asyncio.create_task(service.run())
    try:
        await eventually(lambda: service.readiness.is_ready or task.done())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with running_gateway(redis_url) as gateway, serving_metrics(gateway.server, listener):
                assert service.health_port is not None
                yield Observed(service.health_port, listener.getsockname()[1], gateway.url)
    finally:
        service.request_drain()
        await task


async def load(there: Observed, redis: RedisClient) -> None:
    """Makes some of everything: answers, refusals, priorities, a grammar."""
    async with httpx.AsyncClient(base_url=there.url, timeout=WAIT_S) as client:
        asked = {"model": "q", "prompt": "x", "max_tokens": 5}
        (await client.post("/v1/completions", json=asked)).raise_for_status()
        assert (await client.post("/v1/completions", json={**asked, "max_tokens": -1})).status_code == 400
        assert (await client.get("/nowhere")).status_code == 404
    for priority in (-5, 0, 5):
        await send(redis, prompt="x", id=f"p{priority}", max_tokens=3, priority=priority)
    await send(redis, prompt="x", id="held", max_tokens=3, regex="a+")
    ends = [(await read_reply(redis, name)).end for name in ("p-5", "p0", "p5", "held")]
    assert [end.code for end in ends] == [None, None, None, "invalid_request"]
    await eventually(lambda: is_queue_empty(redis))
