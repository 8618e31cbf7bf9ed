"""An error from Redis means the same on every server, tested with the servers' real texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.faults import JunkFound, is_no_group, is_refused, is_stale_id, may_pass
from penstock.serving.readiness import Readiness
from penstock.worker.errors import RedisRefused
from penstock.worker.redis import retries

pytestmark = pytest.mark.every_server

PASSING = [
    exceptions.ConnectionError("gone"),
    exceptions.TimeoutError("no answer"),
    exceptions.BusyLoadingError("loading"),
    exceptions.ClusterDownError("no quorum"),
    exceptions.ReadOnlyError("a replica"),
    exceptions.TryAgainError("slots move"),
    exceptions.ResponseError("BUSY Redis is busy running a script"),
    exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
    exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
    OSError("the network is unreachable"),
]
OF_THE_REQUEST = [
    exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
    exceptions.ResponseError("ERR The ID specified in XADD is equal or smaller than the target stream top item"),
    exceptions.ResponseError("ERR value is not an integer or out of range"),
]


@pytest.fixture
async def restricted(redis: RedisClient, redis_url: str) -> AsyncIterator[RedisClient]:
    """A client of a user who may run scripts and nothing else."""
    await redis.execute_command("ACL", "SETUSER", "restricted", "reset", "on", ">x", "~*", "+eval", "+ping")
    async with aclosing(connect(redis_url.replace("//", "//restricted:x@"), decode=False)) as client:
        yield client
    await redis.execute_command("ACL", "DELUSER", "restricted")


async def refusals(restricted: RedisClient, redis_url: str) -> tuple[Any, ...]:
    """Real answers of a server to clients that it will go on refusing."""
    async with aclosing(connect(redis_url.replace("//", "//restricted:wrong@"), decode=False)) as stranger:
        return await asyncio.gather(
            restricted.set("k", "v"),
            restricted.eval("return redis.call('SET', KEYS[1], 1)", 1, "k"),
            stranger.ping(),
            return_exceptions=True,
        )


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_passes_is_waited_for(error: Exception) -> None:
    assert may_pass(error)
    assert retries.must_wait(error)


@pytest.mark.parametrize("error", OF_THE_REQUEST, ids=str)
def test_what_one_request_brought_about_is_its_own(error: Exception) -> None:
    assert not retries.must_wait(error)


async def test_what_a_server_will_go_on_refusing_is_final_at_the_start_and_waited_for_later(
    restricted: RedisClient, redis_url: str
) -> None:
    for error in await refusals(restricted, redis_url):
        assert isinstance(error, exceptions.RedisError)
        assert is_refused(error)
        assert retries.must_wait(error)
        readiness = Readiness()
        await retries.survive(fail(error), "part", readiness)
        assert readiness.refusal is error
        assert readiness.trouble == "refused"
        with pytest.raises(RedisRefused, match="Redis refuses what a worker must do: ") as raised:
            await retries.persist(partial(fail, error), "part", readiness, asyncio.Event())
        assert str(error).rstrip(".") in str(raised.value)
        assert raised.value.__cause__ is error


async def test_a_full_server_passes(redis: RedisClient) -> None:
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(exceptions.RedisError) as refused:
            await redis.set("k", "v")
        assert may_pass(refused.value)
        with pytest.raises(exceptions.RedisError) as refused:
            await redis.eval("return redis.call('SET', KEYS[1], 1)", 1, "k")
        assert may_pass(refused.value)
    finally:
        await redis.config_set("maxmemory", 0)


async def test_a_missing_group_and_a_stale_id_are_told_by_their_words(redis: RedisClient) -> None:
    with pytest.raises(exceptions.ResponseError) as raised:
        await redis.xreadgroup("g", "me", {"s": ">"})
    assert is_no_group(raised.value)
    await redis.xadd("s", {"f": "1"}, id="5-1")
    with pytest.raises(exceptions.ResponseError) as raised:
        await redis.xadd("s", {"f": "1"}, id="5-1")
    assert is_stale_id(raised.value)
    assert not is_no_group(raised.value)


async def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


async def test_a_round_that_fails_makes_the_worker_unready_until_one_succeeds() -> None:
    readiness = Readiness()
    await retries.survive(fail(exceptions.ConnectionError("gone")), "part", readiness)
    assert readiness.reasons == {"part": "no connection to Redis"}
    await retries.survive(fail(exceptions.ResponseError("NOGROUP No such key")), "part", readiness)
    assert not readiness.is_ready
    await retries.survive(fail(None), "part", readiness)
    assert readiness.is_ready


@pytest.mark.parametrize("error", OF_THE_REQUEST, ids=str)
async def test_no_answer_ends_a_periodic_task(error: Exception) -> None:
    readiness = Readiness()
    await retries.survive(fail(error), "part", readiness)
    assert readiness.trouble == "other"
    with pytest.raises(ValueError, match="a mistake of ours"):
        await retries.survive(fail(ValueError("a mistake of ours")), "part", readiness)


async def test_junk_in_a_key_makes_the_worker_unready_and_no_more() -> None:
    readiness = Readiness()
    await retries.survive(fail(JunkFound(keys.requests("q"))), "part", readiness)
    assert "penstock:{q}:requests holds what Penstock never wrote there" in readiness.reasons["part"]
    await retries.survive(fail(None), "part", readiness)
    assert readiness.is_ready


def test_backoff_grows_and_is_bounded() -> None:
    backoff = retries.Backoff(first_s=0.1, longest_s=1.0)
    waits = [backoff.next_s() for _ in range(50)]
    assert 0.05 <= waits[0] <= 0.1
    assert all(0.5 <= wait <= 1.0 for wait in waits[5:])
    backoff.reset()
    assert backoff.next_s() <= 0.1
