"""A streamed answer survives gateways and workers that are killed while it is open."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import expected_text
from penstock.worker.startup_report import STARTED
from tests.support.patience import TEST_S, WAIT_S, eventually
from tests.support.programs.gateway_client import CHAT, chat, read_events, text_of
from tests.support.programs.gateway_process import GatewayProcess
from tests.support.programs.worker_process import WorkerProcess

QUEUE = "q"
NUM_TOKENS = 120


@dataclass
class Stream:
    """One answer, requested until it is whole by a client that only reconnects."""

    number: int
    clients: list[Any]
    text: str = ""
    attempts: Counter[str] = field(default_factory=Counter)
    last_event_id: str | None = None

    @property
    def expected(self) -> str:
        return expected_text(f"user:{self.number}", self.number, NUM_TOKENS)

    async def read(self) -> None:
        at = self.number
        while not await self._try(self.clients[at % len(self.clients)]):
            at += 1
            await asyncio.sleep(0.05)

    async def _try(self, client: Any) -> bool:
        headers = {"Idempotency-Key": f"stream-{self.number}"}
        if self.last_event_id is not None:
            headers["Last-Event-ID"] = self.last_event_id
        body = chat(str(self.number), seed=self.number, max_tokens=NUM_TOKENS, stream=True) | {"model": QUEUE}
        try:
            async with client.stream("POST", CHAT, json=body, headers=headers) as response:
                self.attempts[str(response.status_code)] += 1
                if response.status_code == 503:
                    return False
                assert response.status_code == 200, await response.aread()
                async for event in read_events(response):
                    if event.data == "[DONE]":
                        return True
                    self.text += text_of([event])
                    self.last_event_id = event.id
        except httpx2.TransportError as error:
            self.attempts[type(error).__name__] += 1
        return False


class Fleet:
    """Two gateways and two workers, one of which at a time is killed and comes back."""

    def __init__(self, url: str, folder: Path) -> None:
        self.gateways = [GatewayProcess(url, folder / f"gateway-{place}.log") for place in range(2)]
        engine = {"max_num_seqs": 16, "step_s": 0.01}
        self._workers = [WorkerProcess(url, folder / f"worker-{place}.log", engine=engine) for place in range(2)]
        self.killed: Counter[str] = Counter()

    async def start(self, stack: AsyncExitStack) -> None:
        for worker in self._workers:
            stack.enter_context(worker)
            await has_started(worker)
        for gateway in self.gateways:
            await stack.enter_async_context(gateway)

    async def kill_one(self, what: str, place: int) -> None:
        """Kills one process; returns once it is back."""
        self.killed[what] += 1
        if what == "gateway":
            await self.gateways[place].kill()
            await self.gateways[place].start()
        else:
            await asyncio.to_thread(self._workers[place].kill)
            self._workers[place].__enter__()
            await has_started(self._workers[place])


async def has_started(worker: WorkerProcess) -> None:
    await eventually(lambda: any(event["event"] == STARTED for event in worker.events()))


async def kill_at_random(fleet: Fleet, streams: list[Stream], num_kills: int) -> None:
    """Kills processes, each time after another part of the text has come."""
    chance = random.Random(7)
    whole = sum(len(stream.expected) for stream in streams)
    kinds = ["gateway", "worker"] * (num_kills // 2)
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        due = whole * number / (num_kills + 2)
        await eventually(lambda due=due: sum(len(stream.text) for stream in streams) >= due)
        await fleet.kill_one(kind, chance.randrange(2))


@pytest.mark.timeout(2 * TEST_S)
@pytest.mark.parametrize(("num_streams", "num_kills"), [(40, 4), pytest.param(500, 12, marks=pytest.mark.slow)])
async def test_streams_outlive_gateways_and_workers(
    redis: RedisClient, redis_url: str, tmp_path: Path, num_streams: int, num_kills: int
) -> None:
    fleet = Fleet(redis_url, tmp_path)
    async with AsyncExitStack() as stack:
        await fleet.start(stack)
        limits = httpx2.Limits(max_connections=None)
        clients = [
            await stack.enter_async_context(
                httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S, trust_env=False, limits=limits)
            )
            for gateway in fleet.gateways
        ]
        streams = [Stream(number, clients) for number in range(num_streams)]
        async with asyncio.timeout(TEST_S):
            await asyncio.gather(kill_at_random(fleet, streams, num_kills), *(stream.read() for stream in streams))
        assert [stream.text for stream in streams] == [stream.expected for stream in streams]
        info: Any = await redis.xinfo_stream(keys.requests(QUEUE))
        assert info["entries-added"] == num_streams
        assert set(fleet.killed.values()) == {num_kills // 2}
        assert sum(sum(stream.attempts.values()) for stream in streams) > num_streams
