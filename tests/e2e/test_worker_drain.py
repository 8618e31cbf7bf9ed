"""A worker ends by drain, hand-back or abort, or by itself."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.engine.driver import EngineDriver
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens, fake_model
from penstock.worker import session
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import Aborted, DrainIncomplete, EngineFailed, NameTaken
from penstock.worker.publish.publisher import Publisher
from penstock.worker.service import Model, Say, WorkerService
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.redis_servers.streams import read_stream


async def test_drain_finishes_what_runs_and_takes_nothing_new(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine, name="w") as worker:
        await send(redis, prompt="x", id="x", max_tokens=100)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        worker.service.request_drain()
        await eventually(lambda: "service" in worker.service.readiness.reasons)
        await worker.task
        late = await send(redis, prompt="late")
        assert (await read_reply(redis, "x")).text() == expected_text("x", "x", 100)
    assert engine.prefilled == ["x"]
    assert [entry_id for entry_id, _ in await read_stream(redis, keys.requests("q"))] == [late]
    assert not await redis.exists(keys.heartbeat("q", "w"))
    consumers: Any = await redis.xinfo_consumers(keys.requests("q"), keys.GROUP)
    assert [(each["name"], each["pending"]) for each in consumers] == [(keys.WAITING, 0)]


@pytest.mark.parametrize("holds_back", [False, True])
async def test_drain_hands_back_what_takes_too_long(redis_url: str, redis: RedisClient, holds_back: bool) -> None:
    engine = FakeEngine(step_s=0.005, holds_back=holds_back)
    async with running_worker(redis_url, engine, name="first", drain_timeout_s=0.1) as first:
        for i in range(4):
            await send(redis, prompt=f"p{i}", id=f"r{i}", max_tokens=200, n=1 + i % 2)
        await read_until(redis, "r3", lambda entry: entry.type == "chunk")
        await first.drain()
        assert first.service.metrics.handed_back._value.get() == 4
        assert (await redis.xpending(keys.requests("q"), keys.GROUP))["consumers"] == [
            {"name": keys.WAITING, "pending": 4}
        ]
    second_engine = FakeEngine(holds_back=holds_back)
    async with running_worker(redis_url, second_engine, name="second", heartbeat_ttl_s=1000) as second:
        for i in range(4):
            reply = await read_reply(redis, f"r{i}")
            for index in range(1 + i % 2):
                assert reply.text(index) == expected_text(f"p{i}", f"r{i}", 200, index)
                assert len(reply.tokens(index)) == 200
            assert reply.owners == ["first", "second"]
            assert reply.end.completion_tokens == 200 * (1 + i % 2)
            assert await redis.hmget(keys.state("q", f"r{i}"), "handbacks", "crashes", "attempts") == ["1", None, "2"]
        await eventually(lambda: is_queue_empty(redis))
        assert second.service.metrics.resumed._value.get() == 4
        assert second.service.metrics.reclaimed._value.get() == 0


async def test_what_is_handed_back_keeps_all_that_was_generated(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine()
    async with running_worker(redis_url, engine, drain_timeout_s=0.0, flush_interval_ms=60_000) as worker:
        engine.hold()
        await send(redis, prompt="x", id="x", max_tokens=100)
        await eventually(lambda: engine.prefilled == ["x"])
        engine.allow(1)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        engine.allow(29)
        await eventually(lambda: worker.service._driver.stats.generated_tokens_total == 30)  # type: ignore[union-attr]
        await worker.drain()
        chunks = [
            fields["tokens"]
            for _, fields in await read_stream(redis, keys.reply("q", "x"))
            if fields["type"] == "chunk"
        ]
    assert ",".join(chunks).split(",") == [str(token) for token in expected_tokens(b"x", "x", 0, 30)]


async def test_second_request_to_stop_aborts(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.005)
    async with running_worker(redis_url, engine, drain_timeout_s=1000) as worker:
        await send(redis, prompt="x", id="x", max_tokens=10**6)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        worker.service.request_drain()
        worker.service.request_drain()
        with pytest.raises(Aborted):
            await asyncio.wait_for(worker.task, WAIT_S)


async def test_a_second_request_while_the_engine_stops_closes_all_connections(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, stop = asyncio.Event(), EngineDriver.stop

    async def stop_late(driver: EngineDriver) -> None:
        stopping.set()
        try:
            await asyncio.Event().wait()
        finally:
            await stop(driver)

    monkeypatch.setattr(EngineDriver, "stop", stop_late)
    async with running_worker(redis_url, name="w") as worker:
        worker.service.request_drain()
        await asyncio.wait_for(stopping.wait(), WAIT_S)
        worker.service.request_drain()
        with pytest.raises(Aborted):
            await asyncio.wait_for(worker.task, WAIT_S)
    await eventually(lambda: has_no_connection(redis, "penstock-worker-w"))


async def has_no_connection(redis: RedisClient, name: str) -> bool:
    return name not in [client["name"] for client in await redis.client_list()]


async def test_a_worker_that_drains_serves_its_queue_no_more(redis_url: str, redis: RedisClient) -> None:
    async with running_worker(
        redis_url, FakeEngine(step_s=0.005), drain_timeout_s=1000, heartbeat_ttl_s=1000
    ) as worker:
        await eventually(lambda: redis.exists(keys.serving("q")))
        await send(redis, prompt="x", id="x", max_tokens=10**6)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        worker.service.request_drain()

        async def is_unserved() -> bool:
            return not await redis.exists(keys.serving("q"))

        await eventually(is_unserved)
        assert not worker.task.done()
        await redis.set(keys.cancel("q", "x"), 1)
        await worker.task


async def test_engine_failure_ends_the_worker_and_others_take_over(redis_url: str, redis: RedisClient) -> None:
    async with (
        running_worker(redis_url, FakeEngine(step_s=0.005), name="first", heartbeat_ttl_s=1000) as first,
    ):
        await send(redis, prompt="x", id="x", max_tokens=300)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await send(redis, prompt="poison\0", id="poison")
        with pytest.raises(EngineFailed, match="poison is poison"):
            await first.task
        assert not await redis.exists(keys.heartbeat("q", "first"))
        await redis.set(keys.cancel("q", "poison"), 1)
        async with running_worker(redis_url, name="second", heartbeat_ttl_s=1000):
            reply = await read_reply(redis, "x")
            assert reply.text() == expected_text("x", "x", 300)
            assert reply.owners == ["first", "second"]


async def test_drain_during_load_ends_at_once(redis_url: str) -> None:
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()
    may_go_on = threading.Event()

    def load(_: Say) -> Model:
        loop.call_soon_threadsafe(loading.set)
        may_go_on.wait()
        return fake_model()

    service = WorkerService(WorkerConfig(**QUICK), redis_url, load)
    task = asyncio.create_task(service.run())
    await loading.wait()
    assert not service.readiness.is_ready
    service.request_drain()
    await asyncio.wait_for(task, WAIT_S)
    may_go_on.set()


async def test_failing_load(redis_url: str) -> None:
    def load(_: Say) -> Model:
        raise FileNotFoundError("config.json")

    with pytest.raises(EngineFailed, match=r"config\.json"):
        await WorkerService(WorkerConfig(**QUICK), redis_url, load).run()


async def test_a_name_is_one_worker_s(redis_url: str) -> None:
    async with running_worker(redis_url, name="same"):
        service = WorkerService(WorkerConfig(**{**QUICK, "name": "same"}), redis_url, lambda _: fake_model())
        with pytest.raises(NameTaken, match="same"):
            await service.run()


async def test_what_gives_way_and_cannot_be_published_holds_up_no_drain(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving_way = asyncio.Event()

    async def never(*_: object) -> None:
        giving_way.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Publisher, "wait_published", never)
    monkeypatch.setattr(session, "HAND_BACK_TIMEOUT_S", 0.1)
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, drain_timeout_s=0.01) as worker:
        await send(redis, id="batch", prompt="x", priority=-5)
        await eventually(lambda: engine.prefilled)
        await send(redis, id="high", prompt="x")
        await giving_way.wait()
        worker.service.request_drain()
        await asyncio.wait({worker.task})
        with pytest.raises(DrainIncomplete, match="gave way"):
            worker.task.result()
