"""Order, accounting and early ends of waiting requests, with whole workers."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions

from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.run.entries import EntryReader
from penstock.worker.watch import charging
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send


async def served(redis: RedisClient, tenant: str) -> float:
    """Returns the weighted tokens that a tenant with nothing waiting was served."""
    return float(await redis.zscore(keys.service("q"), tenant) or 0)


async def waiting(redis: RedisClient) -> int:
    pending: Any = await redis.xpending(keys.requests("q"), keys.GROUP)
    return sum(each["pending"] for each in pending["consumers"] if each["name"] == keys.WAITING)


async def test_a_higher_priority_is_next_on_every_worker(redis_url: str, redis: RedisClient) -> None:
    engines = [FakeEngine(max_num_seqs=1), FakeEngine(max_num_seqs=1)]
    for engine in engines:
        engine.hold()
    none_dies: dict[str, Any] = {"heartbeat_ttl_s": WAIT_S}
    async with (
        running_worker(redis_url, engines[0], **none_dies),
        running_worker(redis_url, engines[1], **none_dies),
    ):
        first = [await send(redis, prompt="x", max_tokens=2) for _ in range(2)]
        await eventually(lambda: sum(len(engine.prefilled) for engine in engines) == 2)
        crowd = [await send(redis, prompt="x", max_tokens=2, tenant="crowd") for _ in range(300)]
        high = [await send(redis, prompt="x", max_tokens=2, tenant="other", priority=9) for _ in range(2)]
        await eventually(lambda: _all_wait(redis, len(crowd) + len(high)))
        for engine in engines:
            engine.allow(2)  # as many as the first one takes
        await eventually(lambda: all(len(engine.prefilled) == 2 for engine in engines))
        assert {engine.prefilled[1] for engine in engines} == set(high)
        for engine in engines:
            engine.allow()
        for request_id in (*first, *crowd, *high):
            await read_reply(redis, request_id)
        await eventually(lambda: is_queue_empty(redis))
    each = 1 + 2 * 2  # tokens of a prompt and of a reply, weighted
    assert 2 * each <= await served(redis, "other") <= 4 * each  # it began at what the first two had been served
    assert 300 * each <= await served(redis, "crowd") <= 304 * each
    assert not await redis.exists(keys.charged("q"), keys.bands("q"))


async def _all_wait(redis: RedisClient, count: int) -> bool:
    return await waiting(redis) == count


async def test_what_waits_ends_while_no_worker_has_room(redis_url: str, redis: RedisClient) -> None:
    """One was cancelled by the client library; the other's deadline has passed."""
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine), AsyncClient(redis_url, queue="q") as client:
        await send(redis, prompt="x", id="running", max_tokens=5)
        await eventually(lambda: engine.prefilled)
        handle = await client.submit("y", max_tokens=5)
        late = await send(redis, prompt="z", timeout_s=0.2)
        stays = await send(redis, prompt="w", max_tokens=5)
        await handle.cancel()
        assert (await read_reply(redis, handle.id)).end.finish_reason == "cancelled"
        assert (await read_reply(redis, late)).end.finish_reason == "expired"
        assert engine.prefilled == ["running"]
        engine.allow()
        assert (await read_reply(redis, stays)).end.finish_reason == "length"
    assert engine.prefilled == ["running", stays]


async def test_running_requests_are_charged_before_they_end(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charging, "CHARGE_INTERVAL_S", 0.05)
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine, name="a") as first:
        await send(redis, prompt="x", id="x", tenant="t", max_tokens=1000)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await eventually(lambda: _has_served(redis, "t", 50))
        first.task.cancel()  # it is gone at once, and others find its request
    before = await served(redis, "t")
    async with running_worker(redis_url, name="b"):
        assert (await read_reply(redis, "x")).end.completion_tokens == 1000
        await eventually(lambda: is_queue_empty(redis))
    assert before < await served(redis, "t") == 1 + 2 * 1000


async def _has_served(redis: RedisClient, tenant: str, tokens: int) -> bool:
    return await served(redis, tenant) >= tokens


async def test_what_a_sweep_took_and_nobody_heard_of_is_taken_up(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost: the entry is pending for the worker, which must look."""
    real = EntryReader.sweep
    lost: list[str] = []

    async def sweep(self: EntryReader) -> Any:
        swept = await real(self)
        if swept.entries and not lost:
            lost.extend(entry.id for entry in swept.entries)
            raise exceptions.ConnectionError("lost")
        return swept

    monkeypatch.setattr(EntryReader, "sweep", sweep)
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="running", max_tokens=5)
        await eventually(lambda: engine.prefilled)
        late = await send(redis, prompt="z", timeout_s=0.1)
        assert (await read_reply(redis, late)).end.finish_reason == "expired"
    assert lost == [late]
