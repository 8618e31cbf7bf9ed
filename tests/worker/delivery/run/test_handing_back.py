"""Requests give way to others, and none is released before it is published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from redis import exceptions

from penstock.engine.driver import EngineDriver
from penstock.engine.request import Output
from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import Claim
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import GenerateRequest
from penstock.serving.readiness import Readiness
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.handing_back import MAX_HANDBACKS, HandingBack
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.coalescing import Coalescing
from penstock.worker.publish.outbox import Outbox
from penstock.worker.publish.publisher import Publisher
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.entries import ENTRIES_PER_READ, QueueEntry
from penstock.worker.run.requests import LiveRequest, Parked, Phase, RequestTable
from tests.support.patience import WAIT_S, eventually
from tests.support.redis_servers.streams import read_owners, read_raw_stream
from tests.worker.delivery.delivery_lab import make_live

STREAM = keys.requests("q")
BATCH = GenerateRequest(prompt="x", priority=-5)


@dataclass
class Desk:
    """A worker whose publisher writes nothing until it is started."""

    redis: RedisClient
    requests: RequestTable
    outbox: Outbox
    publisher: Publisher
    driver: EngineDriver
    handing_back: HandingBack

    async def run(self, request_id: str, *, is_started: bool = True, asked: GenerateRequest = BATCH) -> LiveRequest:
        """Makes a request that was taken and claimed, and is in the engine."""
        entry = QueueEntry(await self.take(request_id), {}, 0)
        claim = await self.claim(request_id, entry.id, "w")
        live = LiveRequest("q", request_id, entry, claim, time.monotonic(), asked, structlog.get_logger())
        live.resume([ChoiceBuffer(0)])
        self.requests.add(live)
        if is_started:
            live.start()
        return live

    async def take(self, request_id: str) -> str:
        """Takes an entry, which is then pending here."""
        await self.redis.xadd(STREAM, {"id": request_id, "prompt": "x", "priority": "-5"})
        take = scripts.take("q", worker="w", count=1, max_body_bytes=10_000, max_bytes=10_000)
        [[entry_id, *_]], *_ = await self.redis.execute_command(*take)
        return str(entry_id.decode())

    async def claim(self, request_id: str, entry_id: str, worker: str) -> Claim:
        command = scripts.claim("q", request_id, entry_id=entry_id, worker=worker, instance=worker, ttl_ms=10**6)
        claim = scripts.parse_claim(await self.redis.execute_command(*command), worker)
        assert isinstance(claim, Claim)
        return claim

    async def owner(self, live: LiveRequest) -> str:
        return (await read_owners(self.redis, STREAM))[live.entry_id]

    async def refused(self) -> None:
        """Waits until the server has refused something."""

        async def has_refused() -> bool:
            return "errorstat_OOM" in await self.redis.info("errorstats")

        await eventually(has_refused)

    async def tokens(self, live: LiveRequest) -> list[str]:
        entries = await read_raw_stream(self.redis, keys.reply("q", live.id))
        return [token for _, fields in entries for token in fields.get(b"tokens", b"").decode().split(",") if token]


@pytest.fixture
async def desk(raw: RedisClient) -> AsyncIterator[Desk]:
    config, metrics, requests = WorkerConfig(queue="q", name="w"), WorkerMetrics(), RequestTable(lambda _: None)
    at_once, driver = Coalescing(0, 0, lambda _: None), EngineDriver(FakeEngine())
    outbox = Outbox(config, requests, at_once, has_nodes=False)
    publisher = Publisher(raw, outbox, at_once, metrics, Readiness())
    await driver.start()
    handing_back = HandingBack(raw, config, driver, outbox, publisher, metrics)
    yield Desk(raw, requests, outbox, publisher, driver, handing_back)
    await driver.stop()


@pytest.mark.parametrize("gives_back", ["make_room", "give_back_all"])
async def test_it_is_let_go_of_once_all_is_published(desk: Desk, gives_back: str) -> None:
    live = await desk.run("r")
    for at in range(3):
        desk.outbox.push(live, Output("r", 0, at, (at,), "a"))
    work = desk.handing_back.make_room(1) if gives_back == "make_room" else desk.handing_back.give_back_all()
    giving = asyncio.create_task(work)
    await asyncio.sleep(0)
    await desk.driver.hand_over()  # after the one that it has asked for
    for _ in range(30):  # time for what it would send if it did not wait
        await desk.redis.ping()
    assert await desk.owner(live) == "w"
    assert not giving.done()
    publishing = asyncio.create_task(desk.publisher.run())
    await asyncio.wait({giving, publishing}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert giving.done()
    await giving
    await end_tasks([publishing])
    assert await desk.tokens(live) == ["0", "1", "2"]
    assert await desk.owner(live) == keys.WAITING
    assert desk.requests.get("r") is None
    assert (await desk.claim("r", live.entry_id, "heir")).handbacks == 1


LIVES: dict[str, tuple[bool, dict[str, Any]]] = {
    "batch work": (True, {}),
    "one that did so before": (True, {"handbacks": MAX_HANDBACKS - 1}),
    "one that did so often": (False, {"handbacks": MAX_HANDBACKS}),
    "one that did so more often": (False, {"handbacks": MAX_HANDBACKS + 1}),
    "one of the usual priority": (False, {"asked": GenerateRequest(prompt="x")}),
    "one of a higher priority": (False, {"asked": GenerateRequest(prompt="x", priority=1)}),
}


@pytest.mark.parametrize("name", LIVES)
async def test_what_gives_way(desk: Desk, name: str) -> None:
    gives_way, claim = LIVES[name]
    live = make_live(**{"asked": BATCH, **claim})
    desk.requests.add(live)
    able = {}
    for live.phase in Phase:
        able[live.phase] = desk.handing_back.num_able
    assert able == {phase: int(gives_way and phase is Phase.RUNNING) for phase in Phase}


async def test_what_gives_way_already_makes_room_for_one_alone(desk: Desk) -> None:
    live = await desk.run("r")
    desk.outbox.push(live, Output("r", 0, 0, (0,), "a"))
    giving = asyncio.create_task(desk.handing_back.make_room(1))
    await asyncio.sleep(0)
    assert desk.handing_back.num_able == 0
    await end_tasks([giving])
    assert desk.handing_back.num_able == 1


async def test_the_lowest_gives_way_and_of_those_what_costs_the_least_to_begin_again(desk: Desk) -> None:
    usual, long, short = [await desk.run(request_id) for request_id in ("usual", "long", "short")]
    low = await desk.run("low", asked=GenerateRequest(prompt="x", priority=-9))
    for live, num_tokens in ((usual, 20), (long, 30), (short, 10), (low, 90)):
        live.prompt_tokens = num_tokens
    await desk.handing_back.make_room(2)
    assert [live.id for live in desk.requests] == ["usual", "long"]
    assert [await desk.owner(live) for live in (low, short)] == [keys.WAITING] * 2


async def test_all_make_way_for_a_suspect_and_none_of_it_counts_as_handed_back(desk: Desk) -> None:
    high = await desk.run("high", asked=GenerateRequest(prompt="x", priority=1000))
    preparing = await desk.run("preparing", is_started=False)
    await desk.handing_back.make_way()
    assert not len(desk.requests)
    for live in (high, preparing):
        assert live.is_gone
        assert await desk.owner(live) == keys.WAITING
        assert await desk.redis.hmget(keys.state("q", live.id), "status", "handbacks") == [b"queued", b"0"]


async def test_what_was_taken_away_while_redis_refuses_is_claimed_again_here(desk: Desk) -> None:
    live, preparing = await desk.run("r"), await desk.run("preparing", is_started=False)
    desk.requests.must_recover = False
    await desk.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(exceptions.RedisError):
            await desk.handing_back.make_way()
    finally:
        await desk.redis.config_set("maxmemory", 0)
    assert live.is_gone  # the engine has it no more
    assert preparing.is_gone
    assert desk.requests.must_recover


async def test_all_is_given_back_suspects_too_as_soon_as_redis_takes_it(desk: Desk) -> None:
    live = await desk.run("r")
    entry = QueueEntry(await desk.take("suspect"), {}, 0)
    desk.requests.park(Parked("q", "suspect", entry, priority=0, deadline_s=None, due_s=0.0))
    publishing = asyncio.create_task(desk.publisher.run())
    await desk.redis.config_resetstat()
    await desk.redis.config_set("maxmemory", 1)
    try:
        giving = asyncio.create_task(desk.handing_back.give_back_all())
        await desk.refused()
        assert not giving.done()
    finally:
        await desk.redis.config_set("maxmemory", 0)
    await asyncio.wait_for(giving, WAIT_S)
    await end_tasks([publishing])
    assert await desk.owner(live) == keys.WAITING
    assert (await desk.redis.xpending(STREAM, keys.GROUP))["consumers"] == [
        {"name": keys.WAITING.encode(), "pending": 2}
    ]


async def test_any_number_of_entries_waits_again(desk: Desk) -> None:
    entry_ids = [await desk.take(f"r{number}") for number in range(ENTRIES_PER_READ + 1)]
    await desk.handing_back.let_wait(entry_ids, has_had=False)
    assert (await desk.redis.xpending(STREAM, keys.GROUP))["consumers"] == [
        {"name": keys.WAITING.encode(), "pending": len(entry_ids)}
    ]
