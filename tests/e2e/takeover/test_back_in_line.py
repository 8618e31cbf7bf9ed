"""Requests of dead and drained workers, or set aside for a model, keep their priorities and early ends."""

from __future__ import annotations

import pytest

from penstock.producer import AsyncClient
from penstock.protocol import keys, scripts
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_tokens
from tests.e2e.trouble.test_other_fleet import NEW, OLD
from tests.support.patience import eventually
from tests.support.programs.worker_harness import (
    add_chunk,
    is_queue_empty,
    read_reply,
    read_until,
    running_worker,
    send,
    take_and_claim,
)

BATCH = -1000


@pytest.mark.parametrize("leaves", ["drains", "dies"])
async def test_what_it_had_takes_the_place_of_batch_work(redis_url: str, redis: RedisClient, leaves: str) -> None:
    """Batch work fills all other workers, and would for long."""
    first_engine, second_engine = FakeEngine(max_num_seqs=1), FakeEngine(max_num_seqs=1)
    first_engine.hold()
    async with running_worker(redis_url, first_engine, name="first", drain_timeout_s=0.0) as first:
        await send(redis, prompt="x", id="urgent", max_tokens=3, priority=1000)
        await eventually(lambda: first_engine.prefilled == ["urgent"])
        async with running_worker(redis_url, second_engine, name="second"):
            await send(redis, prompt="y", id="batch", max_tokens=10**6, priority=BATCH)
            await read_until(redis, "batch", lambda entry: entry.type == "chunk")
            if leaves == "drains":
                await first.drain()
            else:
                first.task.cancel()  # it is gone at once, and its key is left to lapse
            assert (await read_reply(redis, "urgent")).owners == ["first", "second"]
            await redis.set(keys.cancel("q", "batch"), "1")
            assert (await read_reply(redis, "batch")).end.finish_reason == "cancelled"
            await eventually(lambda: is_queue_empty(redis))


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_what_is_set_aside_ends_by_a_worker_of_any_model(redis_url: str, redis: RedisClient, why: str) -> None:
    """No worker with its own model is there, and only its own deadline ends it."""
    digest = OLD.digest(None)
    await redis.set(keys.heartbeat("q", set_aside_for(digest)), "old", px=10**6)
    await send(redis, prompt="y", id="begun", max_tokens=9, **({"timeout_s": 1} if why == "expired" else {}))
    await take_and_claim(redis, "old", "begun", digest=digest)
    await add_chunk(redis, "begun", 1, 0, expected_tokens(b"y", "begun", 0, 2))
    entry_id = str(await redis.hget(keys.state("q", "begun"), "entry"))
    await redis.execute_command(*scripts.set_aside("q", worker="old", entry_id=entry_id, kind=digest))
    async with running_worker(redis_url, name="new", identity=NEW) as new, AsyncClient(redis_url, queue="q") as client:
        if why == "cancelled":
            await client.handle("begun").cancel()
        reply = await read_reply(redis, "begun")
        assert reply.end.finish_reason == why
        assert (reply.owners, len(reply.tokens(0))) == (["old", "new"], 2)
        await eventually(lambda: is_queue_empty(redis))
        assert new.engine.prefilled == []
    assert not await redis.exists(keys.aside("q", digest), keys.named("q"))


async def test_who_is_noted_as_cancelled_and_is_not_keeps_its_turn(redis_url: str, redis: RedisClient) -> None:
    """Otherwise whoever may write to that set could have its requests run before all others."""
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="running", max_tokens=5)
        await eventually(lambda: engine.prefilled == ["running"])
        usual = await send(redis, prompt="y", max_tokens=5)
        await send(redis, prompt="z", id="pushy", max_tokens=5, priority=-1)
        await redis.sadd(keys.cancelled("q"), "pushy")
        await eventually(lambda: _is_used_up(redis))
        engine.allow()
        for request_id in ("running", usual, "pushy"):
            assert (await read_reply(redis, request_id)).end.finish_reason == "length"
    assert engine.prefilled == ["running", usual, "pushy"]


async def _is_used_up(redis: RedisClient) -> bool:
    return not await redis.exists(keys.cancelled("q"), keys.asked("q"), keys.due("q"))
