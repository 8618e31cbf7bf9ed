"""When the server's clock is set back or forward, dead workers are found in time, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess
from tests.support.redis_servers.clocks import ShiftedServer
from tests.support.redis_servers.streams import read_scores

FAR_S = 100_000.0  # no test waits for so long
SHORT_S = 90.0


@pytest.fixture
async def redis(shifted: ShiftedServer) -> AsyncIterator[RedisClient]:
    client = connect(shifted.url, decode=True)
    yield client
    await client.aclose()


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


Step = Callable[[ShiftedServer, WorkerProcess], None]


def back_then_death(server: ShiftedServer, victim: WorkerProcess) -> None:
    server.set_ahead(-FAR_S)
    victim.kill()


def death_then_back(server: ShiftedServer, victim: WorkerProcess) -> None:
    victim.kill()
    server.set_ahead(-FAR_S)


def death_while_back(server: ShiftedServer, victim: WorkerProcess) -> None:
    server.set_ahead(-FAR_S)
    victim.kill()
    server.set_ahead(0)


def forward_then_death(server: ShiftedServer, victim: WorkerProcess) -> None:
    server.set_ahead(SHORT_S)
    victim.kill()


def death_then_forward(server: ShiftedServer, victim: WorkerProcess) -> None:
    victim.kill()
    server.set_ahead(SHORT_S)


def forward_and_back(server: ShiftedServer, victim: WorkerProcess) -> None:
    server.set_ahead(SHORT_S)
    victim.kill()
    server.set_ahead(-SHORT_S)


@pytest.mark.parametrize(
    "step",
    [back_then_death, death_then_back, death_while_back, forward_then_death, death_then_forward, forward_and_back],
)
async def test_the_dead_are_found_whatever_the_clock_does(
    shifted: ShiftedServer, redis: RedisClient, tmp_path: Path, step: Step
) -> None:
    """A worker that is blocked in a read when the clock is set finds them."""
    engine = {"step_s": 0.005}
    make = WorkerProcess(shifted.url, tmp_path / "log", engine=engine, name="victim", heartbeat_ttl_s=2.0)
    with make as victim, capture_logs() as logs:
        await send(redis, prompt="p", id="r", max_tokens=4000)
        await read_until(redis, "r", is_chunk)
        async with running_worker(shifted.url, FakeEngine(), name="heir", heartbeat_ttl_s=30.0):
            step(shifted, victim)
            reply = await read_reply(redis, "r")
            await eventually(lambda: is_queue_empty(redis))
            left_ms = await redis.pttl(keys.looked("q"))
    assert reply.owners[0] == "victim"
    assert reply.owners[-1] == "heir"
    assert reply.text() == expected_text("p", "r", 4000)
    assert left_ms <= 100
    assert "redis_unavailable" not in {event["event"] for event in logs}  # no read was blocked for longer than it asked


async def test_running_requests_outlive_any_steps(shifted: ShiftedServer, redis: RedisClient, tmp_path: Path) -> None:
    """At each step forward both workers seem dead; at each step back, what a dead one left lives on."""
    engine = {"step_s": 0.002}
    with (
        WorkerProcess(shifted.url, tmp_path / "one", engine=engine, name="one") as one,
        WorkerProcess(shifted.url, tmp_path / "two", engine=engine, name="two"),
    ):
        async with AsyncClient(shifted.url, queue="q") as client:
            handles = [await client.submit(f"p{i}", max_tokens=1200, tenant=f"t{i % 3}") for i in range(6)]
            readers = [asyncio.create_task(handle.result(timeout=WAIT_S)) for handle in handles]
            await read_until(redis, handles[0].id, is_chunk)
            for ahead_s in (SHORT_S, 0.0, -SHORT_S, -FAR_S, 5.0, -5.0, 2 * SHORT_S):
                shifted.set_ahead(ahead_s)
                await eventually(lambda: have_short_lives(redis, "one", "two"))
            await eventually(lambda: no_crash_counts(redis, [handle.id for handle in handles]))
            one.kill()
            replies = await asyncio.gather(*readers)
            await eventually(lambda: is_queue_empty(redis))
    for i, reply in enumerate(replies):
        assert reply.text == expected_text(f"p{i}", reply.request_id, 1200)
        assert list(reply.choices[0].tokens) == expected_tokens(f"p{i}".encode(), reply.request_id, 0, 1200)


async def no_crash_counts(redis: RedisClient, request_ids: list[str]) -> bool:
    """Checks whether the workers that seemed dead have said that they live."""
    counts = [await redis.hmget(keys.state("q", each), "crashes", "strikes") for each in request_ids]
    return all(count in (None, "0") for pair in counts for count in pair)


async def have_short_lives(redis: RedisClient, *workers: str) -> bool:
    """Checks whether each worker has a heartbeat that was set by the present clock, or cut to it."""
    lives = [await redis.pttl(keys.heartbeat("q", worker)) for worker in workers]
    return all(0 < left_ms <= 1000 for left_ms in lives)


LATE = re.compile(
    r"penstock:(q:\{.*\}:(reply|state|cancel)|wake:.*|\{q\}:(seen:.*|answers:.*|cancelled|lanes:asked|drain:.*|dead.*|malformed.*))"
)
"""Keys that only say how long something is kept: a step back lets them expire later, and harms nobody."""


async def test_no_key_says_for_longer_than_it_was_set_for_that_somebody_lives(
    shifted: ShiftedServer, redis: RedisClient, tmp_path: Path
) -> None:
    """All keys are checked; keys that hold sets are checked one by one."""
    victim = WorkerProcess(shifted.url, tmp_path / "log", name="victim")
    async with AsyncClient(shifted.url, queue="q") as client, running_worker(shifted.url, name="heir"):
        with victim:
            await eventually(lambda: redis.zscore(keys.serving("q"), "victim"))
            await client.generate("x", max_tokens=2, affinity="a", timeout_s=1000)
            await client.count_tokens("x")
            await send(redis, junk="x")
            await (await client.submit("x", max_tokens=2)).cancel()
            await eventually(lambda: redis.exists(keys.malformed("q")))
            await eventually(lambda: redis.zscore(keys.reports("q"), "victim"))
            before = {str(key): await redis.pttl(key) for key in await redis.keys()}
            shifted.set_ahead(-FAR_S)
        assert await outliving(redis, before)
        await eventually(lambda: none_outlives(redis, before))
        assert keys.heartbeat("q", "victim") not in await redis.keys()
        assert await redis.zscore(keys.serving("q"), "victim") is None


async def none_outlives(redis: RedisClient, before: dict[str, int]) -> bool:
    return all(LATE.fullmatch(key) for key in await outliving(redis, before))


async def outliving(redis: RedisClient, before: dict[str, int]) -> set[str]:
    """Returns keys, and members of time-ordered sets, that last longer than they could."""
    bound_ms = FAR_S * 1000 / 2
    now_s, _ = await redis.time()
    found = {key for key in map(str, await redis.keys()) if await redis.pttl(key) > before.get(key, 0) + bound_ms}
    for key in (keys.serving("q"), keys.reports("q"), keys.queues(), keys.passed("q")):
        found |= {key for score in (await read_scores(redis, key)).values() if score > now_s * 1000 + bound_ms}
    return found
