"""`penstock card` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.cli import run
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.programs.worker_harness import running_worker


async def card(redis_url: str, queue: str, *more: str) -> int:
    return await asyncio.to_thread(run, ["card", "--redis-url", redis_url, "--queue", queue, *more])


async def test_the_card_of_a_queue(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_worker(redis_url, name="w", max_n=3):
        capsys.readouterr()
        assert await card(redis_url, "q") == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
        assert (rows["worker"].strip(), rows["max_n"].strip()) == ("w", "3")
        assert await card(redis_url, "q", "--json") == 0
        assert json.loads(capsys.readouterr().out)["max_n"] == 3
        assert await card(redis_url, "other") == 1
        assert capsys.readouterr().err == "penstock: queue other has no workers; queues that are served: q\n"


async def test_a_queue_of_none(redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert await card(redis_url, "q") == 1
    assert "queues that are served: none" in capsys.readouterr().err
    await redis.hset(keys.card("q"), "junk", "x")
    assert await card(redis_url, "q") == 1
    assert "queue q: the model card's key holds no valid card" in capsys.readouterr().err
