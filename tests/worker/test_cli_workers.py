"""`penstock workers`: over Redis, from anywhere."""

from __future__ import annotations

import asyncio

import pytest
from worker_harness import send

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.cli import run
from penstock.worker.protocol.consumers import set_aside_for
from penstock.worker.protocol.members import backlog, members


async def penstock(redis_url: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, [*arguments, "--redis-url", redis_url, "--queue", "q"])


async def test_requests_that_nobody_has_are_backlog_and_no_worker(
    redis_url: str, redis: RedisClient, raw: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    for i in range(6):
        await send(redis, prompt="x", id=str(i))
    await redis.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"}, count=1)
    for consumer in (keys.UNOWNED, set_aside_for("d")):
        await redis.xreadgroup(keys.GROUP, consumer, {keys.requests("q"): ">"}, count=1)
    await redis.hset(keys.digests("q"), "dead", "0123456789abcdef" * 2)
    found = await members(raw, "q")
    assert [member.name for member in found] == ["dead"]
    assert await backlog(raw, "q", found) == 5
    assert await penstock(redis_url, "workers") == 0
    heading, row, below = capsys.readouterr().out.splitlines()
    assert heading.split() == ["worker", "state", "requests", "heartbeat", "expires", "in", "model"]
    assert row.split() == ["dead", "lost", "1", "0123456789ab"]
    assert below == "backlog: 5"


async def test_a_queue_without_workers(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await penstock(redis_url, "workers") == 0
    assert capsys.readouterr().out == "queue q has no workers\nbacklog: 0\n"
