"""The workers of a queue as Redis knows them."""

from __future__ import annotations

import pytest
from worker_harness import QUICK, eventually, read_until, running_worker, send

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.chaos.fake_engine import FakeEngine
from penstock.worker.protocol.members import Member, UnknownWorker, members, tell_to_drain

pytestmark = pytest.mark.every_server


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def test_members(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    assert await members(raw, "q") == []
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    await send(redis, prompt="x", id="x", max_tokens=10**6)
    await redis.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"})
    await send(redis, prompt="y", id="y", max_tokens=10**6)
    async with running_worker(redis_url, FakeEngine(step_s=0.01), name="w", reclaim_interval_s=1000):
        await read_until(redis, "y", is_chunk)
        gone, worker = await members(raw, "q")
        assert gone == Member("dead", num_taken=1, heartbeat_left_ms=None, is_draining=False)
        assert (worker.name, worker.num_taken, worker.is_draining) == ("w", 1, False)
        assert 0 < (worker.heartbeat_left_ms or 0) <= QUICK["heartbeat_ttl_s"] * 1000
        await redis.set(keys.cancel("q", "y"), 1)


async def test_a_mark_is_for_one_process_and_not_for_the_next_of_its_name(redis_url: str, raw: RedisClient) -> None:
    with pytest.raises(UnknownWorker, match="no live worker 'w'"):
        await tell_to_drain(raw, "q", "w")
    await raw.set(keys.drain("q", "w"), "an earlier process")
    async with running_worker(redis_url, name="w", heartbeat_ttl_s=0.6) as worker:
        await eventually(lambda: _has_left(raw, 1, 550))
        await eventually(lambda: _has_left(raw, 551, 600))  # so it has beaten since
        assert worker.service.readiness.is_ready
        assert await raw.get(keys.drain("q", "w")) == b"an earlier process"


async def _has_left(raw: RedisClient, least_ms: int, most_ms: int) -> bool:
    return least_ms <= int(await raw.pttl(keys.heartbeat("q", "w"))) <= most_ms
