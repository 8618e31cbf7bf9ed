"""Entries are taken when they may; while slow ones are prepared, others pass, and what ends them is known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from penstock.worker.errors import RedisRefused
from penstock.worker.intake.claiming import Claimer
from penstock.worker.intake.intake import SLOW_S
from penstock.worker.run import entries as reading
from penstock.worker.run.entries import QueueEntry
from penstock.worker.watch import sweeping
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, running_worker, send, take_and_claim


class Slow:
    """Holds the admission of one prompt until `go` is set, and then fails once if there is something to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prompt: bytes, error: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.calls = 0
        claim = Claimer.claim

        async def slow(claimer: Claimer, entry: QueueEntry, **options: Any) -> Any:
            if entry.fields.get(b"prompt") == prompt:
                self.calls += 1
                await self.go.wait()
                if error is not None and self.calls == 1:
                    raise error
            return await claim(claimer, entry, **options)

        monkeypatch.setattr(Claimer, "claim", slow)


async def test_others_go_past_a_slow_one(redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, b"slow")
    async with running_worker(redis_url):
        held = await send(redis, prompt="slow", max_tokens=5)
        for prompt in ("first", "second"):
            request_id = await send(redis, prompt=prompt, max_tokens=5)
            assert (await read_reply(redis, request_id)).text() == expected_text(prompt, request_id, 5)
        slow.go.set()
        assert (await read_reply(redis, held)).text() == expected_text("slow", held, 5)
    assert slow.calls == 1


async def test_slow_ones_take_up_room(redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, b"slow")
    engine = FakeEngine(max_num_seqs=2)
    async with running_worker(redis_url, engine):
        ids = [await send(redis, prompt="slow", max_tokens=5) for _ in range(6)]
        await eventually(lambda: slow.calls == 2)
        slow.go.set()
        for request_id in ids:
            await read_reply(redis, request_id)
    assert engine.most_rows <= 2


async def test_a_slow_one_that_fails_is_taken_again(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, b"slow", exceptions.ConnectionError("gone"))
    async with running_worker(redis_url):
        for _ in range(3):  # new connections make the worker look at its entries, too
            await read_reply(redis, await send(redis, prompt="before", max_tokens=5))
        held = await send(redis, prompt="slow", max_tokens=5)
        await eventually(lambda: slow.calls == 1)
        await asyncio.sleep(2 * SLOW_S)  # were it shorter, it would not be slow
        slow.go.set()
        assert (await read_reply(redis, held)).text() == expected_text("slow", held, 5)
        await eventually(lambda: is_queue_empty(redis))
    assert slow.calls == 2


async def test_what_a_slow_one_finds_out_ends_the_worker(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, b"slow", RedisRefused("no permission"))
    async with running_worker(redis_url) as running:
        await send(redis, prompt="slow", max_tokens=5)
        beside = await send(redis, prompt="beside", max_tokens=5)
        await read_reply(redis, beside)
        slow.go.set()
        with pytest.raises(RedisRefused, match="no permission"):
            await running.task


async def test_a_drain_waits_for_a_slow_one(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, b"slow")
    async with running_worker(redis_url) as running:
        held = await send(redis, prompt="slow", max_tokens=5)
        beside = await send(redis, prompt="beside", max_tokens=5)
        await read_reply(redis, beside)
        draining = asyncio.create_task(running.drain())
        await eventually(lambda: not running.service.readiness.is_ready)
        slow.go.set()
        await draining
        assert (await read_reply(redis, held)).text() == expected_text("slow", held, 5)


async def test_entries_of_dead_workers_are_back_in_line(redis_url: str, redis: RedisClient) -> None:
    """Entries go by priority as new ones do, and among equals first within their tenant."""
    stream, engine = keys.requests("q"), FakeEngine(max_num_seqs=1)
    await redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    left = {await send(redis, prompt="left", max_tokens=5) for _ in range(3)}
    await redis.xreadgroup(keys.GROUP, "dead", {stream: ">"})
    new = {await send(redis, prompt="new", max_tokens=5, timeout_s=30) for _ in range(3)}
    urgent = await send(redis, prompt="urgent", max_tokens=5, priority=1)
    assert await redis.execute_command(*scripts.retire("q", stream=keys.requests("q"), consumer="dead", count=100)) == 3
    async with running_worker(redis_url, engine):
        for request_id in left | new | {urgent}:
            await read_reply(redis, request_id)
    assert engine.prefilled[0] == urgent
    assert set(engine.prefilled[1:4]) == left
    assert set(engine.prefilled[4:]) == new


async def test_one_sweep_ends_all_that_are_over(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of entries is ended at a time, however many there are."""
    monkeypatch.setattr(sweeping, "SWEEP_INTERVAL_S", 10**6)
    monkeypatch.setattr(reading, "SWEPT_PER_READ", 2)
    monkeypatch.setattr(reading, "ENTRIES_PER_READ", 4)
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine) as worker:
        await send(redis, prompt="x", id="running", max_tokens=5)
        await eventually(lambda: engine.prefilled)
        ids = [await send(redis, prompt="y", max_tokens=5) for _ in range(11)]
        for request_id in ids:
            await redis.set(keys.cancel("q", request_id), "1")
        await redis.sadd(keys.cancelled("q"), *ids)
        await worker.service._session._intake.sweep()  # type: ignore[union-attr]
        assert not await redis.exists(keys.due("q"))  # all have been taken out
        for request_id in ids:
            assert (await read_reply(redis, request_id)).end.finish_reason == "cancelled"


async def test_what_a_sweep_finds_on_its_way_back_to_the_queue_is_looked_at_again(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry has its place as soon as the server has put it back, and the worker learns that only then."""
    monkeypatch.setattr(sweeping, "SWEEP_INTERVAL_S", 10**6)
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine) as worker:
        await send(redis, prompt="x", id="running", max_tokens=5)
        await eventually(lambda: engine.prefilled)
        session: Any = worker.service._session
        entry = await send(redis, prompt="y", max_tokens=5)
        session.requests.taking.add(entry)
        await redis.set(keys.cancel("q", entry), "1")
        await redis.sadd(keys.cancelled("q"), entry)
        await session._intake.sweep()
        session.requests.taking.discard(entry)
        await session._intake.sweep()
        assert not session._intake._passed_over
        assert (await read_reply(redis, entry)).end.finish_reason == "cancelled"


async def test_nothing_new_is_taken_while_writes_fail(redis_url: str, redis: RedisClient) -> None:
    """A full server hands entries out, but takes no writes."""
    stream, engine = keys.requests("q"), FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, heartbeat_ttl_s=1000) as worker:
        failures = worker.service.metrics.publish_failures._value
        ids = [await send(redis, prompt="x", max_tokens=5) for _ in range(3)]
        await eventually(lambda: engine.prefilled)
        await redis.config_set("maxmemory", 1)
        try:
            engine.allow(1)  # the first token can't be written
            await eventually(lambda: failures.get() >= 4)
            engine.allow()
            await eventually(lambda: not engine.has_work())  # there is room
            before = failures.get()
            await eventually(lambda: failures.get() >= before + 2)
            (worker_has,) = await redis.xpending_range(stream, keys.GROUP, "-", "+", 10, worker.service.config.name)
            assert worker_has["message_id"] in ids
        finally:
            await redis.config_set("maxmemory", 0)
        for request_id in ids:
            assert (await read_reply(redis, request_id)).text() == expected_text("x", request_id, 5)


async def test_a_second_entry_runs_if_the_first_was_deleted_before_its_end(redis_url: str, redis: RedisClient) -> None:
    first = await send(redis, prompt="x", id="same", max_tokens=5)
    await take_and_claim(redis, "dead", "same")
    await redis.xdel(keys.requests("q"), first)
    second = await send(redis, prompt="x", id="same", max_tokens=5)
    engine = FakeEngine()
    async with running_worker(redis_url, engine) as worker:
        await eventually(lambda: is_queue_empty(redis))
        assert worker.service.metrics.duplicates._value.get() == 0
    assert engine.prefilled == ["same"]
    assert await redis.hget(keys.state("q", "same"), "entry") == second
    assert (await read_reply(redis, "same")).text() == expected_text("x", "same", 5)
