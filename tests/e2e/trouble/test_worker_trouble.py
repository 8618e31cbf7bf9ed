"""With Redis in trouble, a worker keeps what runs and retries; nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from penstock.worker.errors import RedisRefused
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.redis_servers.redis_proxy import RedisProxy


async def test_lost_answers_double_and_lose_nothing(redis_url: str, redis: RedisClient) -> None:
    async with RedisProxy(redis_url, seed=3) as proxy:
        engines = [FakeEngine(step_s=0.002, max_num_seqs=16, holds_back=True) for _ in range(2)]
        async with (
            running_worker(proxy.url, engines[0], heartbeat_ttl_s=30, name="a") as first,
            running_worker(proxy.url, engines[1], heartbeat_ttl_s=30, name="b") as second,
        ):
            proxy.loss = 0.1
            ids = [await send(redis, prompt=f"p{i}", max_tokens=60, n=1 + i % 2) for i in range(80)]
            replies = [await read_reply(redis, entry_id) for entry_id in ids]
            await eventually(lambda: is_queue_empty(redis))
            proxy.loss = 0.0
            failures = [w.service.metrics.publish_failures._value.get() for w in (first, second)]
    assert proxy.num_lost > 20
    assert all(failures)
    for i, (entry_id, reply) in enumerate(zip(ids, replies, strict=True)):
        for index in range(1 + i % 2):
            assert reply.tokens(index) == expected_tokens(f"p{i}".encode(), entry_id, index, 60)
            assert reply.text(index) == expected_text(f"p{i}", entry_id, 60, index)
        assert reply.end.completion_tokens == 60 * (1 + i % 2)
        assert await redis.xlen(keys.reply("q", entry_id)) == len(reply.entries)
        assert await redis.hget(keys.state("q", entry_id), "crashes") is None


async def test_redis_away_for_a_while(redis_url: str, redis: RedisClient) -> None:
    async with RedisProxy(redis_url) as proxy:
        engine = FakeEngine(step_s=0.002)
        async with running_worker(proxy.url, engine) as worker:
            await send(redis, prompt="x", id="x", max_tokens=200)
            await read_until(redis, "x", lambda entry: entry.type == "chunk")
            await proxy.stop()
            await eventually(lambda: not worker.service.readiness.is_ready)
            late = await send(redis, prompt="late", max_tokens=5)
            await eventually(lambda: not engine.has_work())  # generation went on
            await proxy.start()
            reply = await read_reply(redis, "x")
            assert (await read_reply(redis, late)).text() == expected_text("late", late, 5)
            await eventually(lambda: worker.service.readiness.is_ready)
    assert reply.text() == expected_text("x", "x", 200)
    assert reply.owners[0] == reply.owners[-1]


async def test_worker_waits_for_a_redis_that_is_not_there_yet(redis_url: str, redis: RedisClient) -> None:
    proxy = RedisProxy(redis_url)
    await proxy.start()
    await proxy.stop()
    entry_id = await send(redis, prompt="x", max_tokens=5)

    async def come_up() -> None:
        await asyncio.sleep(0.2)
        await proxy.start()

    up = asyncio.create_task(come_up())
    async with running_worker(proxy.url):
        assert (await read_reply(redis, entry_id)).text() == expected_text("x", entry_id, 5)
    await up
    await proxy.stop()


async def test_flushall_forgets_requests_and_the_worker_goes_on(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="x", max_tokens=10**6)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await redis.flushall()
        entry_id = await send(redis, prompt="after", max_tokens=5)
        assert (await read_reply(redis, entry_id)).text() == expected_text("after", entry_id, 5)
        await eventually(lambda: not engine.has_work())
        assert not await redis.exists(keys.reply("q", "x"))


async def test_a_reply_that_vanishes_is_made_anew(redis_url: str, redis: RedisClient) -> None:
    """After a failover, a replica may have the queue entry but not the claim."""
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="x", max_tokens=100)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await redis.delete(keys.reply("q", "x"), keys.state("q", "x"))
        reply = await read_reply(redis, "x")
        await eventually(lambda: is_queue_empty(redis))
    assert reply.text() == expected_text("x", "x", 100)
    assert reply.tokens() == expected_tokens(b"x", "x", 0, 100)


async def test_a_full_server_is_waited_for(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine(step_s=0.002)
    async with running_worker(redis_url, engine) as worker:
        await send(redis, prompt="x", id="x", max_tokens=300, n=2)
        await read_until(redis, "x", lambda entry: entry.type == "chunk")
        await redis.config_set("maxmemory", 1)
        try:
            await eventually(lambda: "publisher" in worker.service.readiness.reasons)
        finally:
            await redis.config_set("maxmemory", 0)
        reply = await read_reply(redis, "x")
        await eventually(lambda: worker.service.readiness.is_ready)
    for index in (0, 1):
        assert reply.text(index) == expected_text("x", "x", 300, index)
        assert len(reply.tokens(index)) == 300


async def test_restart_of_a_server_that_keeps_its_data(tmp_path: Path) -> None:
    server = EmbeddedServer(data_dir=tmp_path)
    server.start()
    try:
        redis = connect(server.url, decode=True)
        async with running_worker(server.url, FakeEngine(step_s=0.002)):
            await send(redis, prompt="x", id="x", max_tokens=200)
            await read_until(redis, "x", lambda entry: entry.type == "chunk")
            server.kill()
            server.start()
            reply = await read_reply(redis, "x")
            await eventually(lambda: is_queue_empty(redis))
        await redis.aclose()
    finally:
        server.stop()
    assert reply.text() == expected_text("x", "x", 200)
    assert len(reply.tokens()) == 200


async def test_missing_permission_ends_the_worker(redis_url: str, redis: RedisClient) -> None:
    await redis.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+@connection")
    async with running_worker(redis_url.replace("redis://", "redis://reader:pw@")) as worker:
        with pytest.raises(RedisRefused):
            await worker.task
    await redis.execute_command("ACL", "DELUSER", "reader")
