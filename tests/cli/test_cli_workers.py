"""`penstock workers` works over Redis, from anywhere."""

from __future__ import annotations

import asyncio
import re

import pytest

from penstock.cli import run
from penstock.protocol import keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.programs.worker_harness import running_worker, send


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
    found = await look(raw, "q")
    assert [worker.name for worker in found.workers] == ["dead"]
    assert (found.num_waiting, found.num_new) == (5, 3)
    assert await penstock(redis_url, "workers") == 0
    heading, row, below = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "worker", "state", "model", "version", "device", "requests", "slots", "pages", "tokens/s", "heartbeat",
    ]  # fmt: skip
    assert row.split() == ["dead", "lost", "0123456789ab", "1"]
    assert below == "backlog: 5"


async def test_what_scaling_goes_by(redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    async with running_worker(redis_url, engine, name="w"):
        for priority in (0, 0, 0, 7):
            await send(redis, prompt="x", max_tokens=2, priority=priority)
        await eventually(lambda: _have_places(redis, 3))

        async def shown_with(field: str, value: str, expected: str) -> list[str]:
            """Returns what is shown before the worker writes the field anew."""
            lines: list[str] = []

            async def is_shown() -> bool:
                await redis.hset(keys.load("q"), field, value)
                assert await penstock(redis_url, "workers") == 0
                lines[:] = capsys.readouterr().out.splitlines()
                return re.search(expected, lines[-1]) is not None

            await eventually(is_shown)
            return lines

        shown = await shown_with("rate", "1234.5", " 1,234 tokens/s")
        without = await shown_with("waiting_tokens", "x", "^backlog")
        engine.allow()
    at = shown.index("backlog: 3")
    *bands, fleet = shown[at + 1 :]
    for band in bands:  # one of the four runs
        assert re.fullmatch(r"priority [07]: [123] requests, \d+ tokens, the oldest waits for \d s", band)
    assert bands[-1].startswith("priority 0: ")
    assert re.fullmatch(r"fleet: 1 of 1 slots, 1,234 tokens/s; wanted workers: \d", fleet)
    assert without[-1] == "backlog: 3"


async def _have_places(redis: RedisClient, count: int) -> bool:
    bands = str(await redis.hget(keys.load("q"), "bands") or "").split()
    return sum(int(band.split(":")[1]) for band in bands) == count


async def test_a_queue_without_workers(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await penstock(redis_url, "workers") == 0
    assert capsys.readouterr().out == "queue q has no workers\nbacklog: 0\n"
