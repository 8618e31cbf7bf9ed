"""Deadlines of requests that clients read, as kept by several gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.gateway.abandonment.readers import AbandonmentWatch
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Handle
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import LossyProxy, ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import standing_with
from tests.support.redis_servers.streams import read_scores

PATIENCE_S = 0.3
FOREVER_S = 10_000.0


async def unfinished(reply: ScriptedReply) -> None:
    await reply.own()


@asynccontextmanager
async def watching(
    url: str, abandon_after_s: float = PATIENCE_S
) -> AsyncIterator[tuple[AsyncClient, AbandonmentWatch]]:
    client = AsyncClient(url)
    async with (
        client,
        Store(url) as store,
        AbandonmentWatch(store, client, standing_with(store), abandon_after_s) as watch,
    ):
        yield client, watch


@pytest.fixture
async def handle(redis: RedisClient, redis_url: str) -> AsyncIterator[Handle]:
    async with ScriptedWorker(redis_url, unfinished), AsyncClient(redis_url) as client:
        await redis.set(keys.heartbeat("default", "scripted"), "1")
        handle = await client.submit("x")
        await eventually(lambda: redis.exists(keys.reply("default", handle.id)))
        yield handle


async def is_cancelled(redis: RedisClient, handle: Handle) -> bool:
    return bool(await redis.exists(keys.cancel("default", handle.id)))


async def read_and_be_killed(url: str, handle: Handle, redis: RedisClient) -> None:
    """Reads as a gateway that had a reader, and never says that the reader has gone."""
    async with watching(url, PATIENCE_S) as (_, watch):
        reading = watch.reading("default", handle.stream())
        reading.__enter__()
        await eventually(lambda: redis.zcard(names.readers()))


async def test_what_a_killed_gateway_read_is_cancelled_by_another(
    redis: RedisClient, redis_url: str, handle: Handle
) -> None:
    await read_and_be_killed(redis_url, handle, redis)
    async with watching(redis_url):
        await eventually(lambda: is_cancelled(redis, handle))
        await eventually(lambda: _is_empty(redis))


async def test_no_gateway_at_all_is_no_reason_to_cancel(redis: RedisClient, redis_url: str, handle: Handle) -> None:
    """Nobody could have read: clients get the whole time again once a gateway is there."""
    await redis.zadd(names.readers(), {f"default {handle.id}": 1})
    async with watching(redis_url, FOREVER_S):
        await eventually(lambda: _has_deadline_in_future(redis))
        assert not await is_cancelled(redis, handle)


async def test_one_of_several_gateways_has_an_abandoned_request_for_itself(
    redis: RedisClient, redis_url: str, handle: Handle
) -> None:
    await redis.set(names.swept(), "1")
    await redis.zadd(names.readers(), {f"default {handle.id}": 1})
    async with AsyncClient(redis_url) as client, Store(redis_url) as store:
        one, other = (
            AbandonmentWatch(store, client, standing_with(store), FOREVER_S),
            AbandonmentWatch(store, client, standing_with(store), FOREVER_S),
        )
        assert await one._take_overdue() == [f"default {handle.id}"]
        assert await other._take_overdue() == []
        assert await _has_deadline_in_future(redis)


@pytest.mark.parametrize("status", ["done", None])
async def test_what_has_ended_is_forgotten_and_not_cancelled(
    redis: RedisClient, redis_url: str, handle: Handle, status: str | None
) -> None:
    """A gateway was killed while the end was on its way, or long after."""
    await redis.set(names.swept(), "1")
    await redis.xadd(keys.reply("default", handle.id), {"type": "end", "finish_reason": "stop"}, id="2-0")
    await redis.hset(keys.state("default", handle.id), "status", "done")
    if status is None:
        await redis.delete(keys.reply("default", handle.id))
    await redis.zadd(names.readers(), {f"default {handle.id}": 1, "default unknown": 1})
    async with watching(redis_url, FOREVER_S):
        await eventually(lambda: _is_empty(redis))
    assert not await is_cancelled(redis, handle)


async def test_readers_are_told_of_again_after_an_outage(
    redis: RedisClient, redis_url: str, redis_server: EmbeddedServer, handle: Handle
) -> None:
    async with LossyProxy(redis_server.port) as proxy, watching(proxy.url) as (_, watch):
        with watch.reading("default", handle.stream()):
            await eventually(lambda: redis.zcard(names.readers()))
            await proxy.refuse()
            await redis.delete(names.readers(), names.swept())
            await proxy.listen()
            await eventually(lambda: _has_deadline_in_future(redis))
        assert not await is_cancelled(redis, handle)


async def test_two_readers_of_one_process_count_as_long_as_one_is_there(
    redis: RedisClient, redis_url: str, handle: Handle
) -> None:
    async with watching(redis_url) as (_, watch):
        with watch.reading("default", handle.stream()):
            with watch.reading("default", handle.stream()):
                pass
            assert watch._readers
            await _deadline_passes(redis)
            assert not await is_cancelled(redis, handle)
        assert not watch._readers
        await eventually(lambda: is_cancelled(redis, handle))


async def _is_empty(redis: RedisClient) -> bool:
    return await redis.zcard(names.readers()) == 0


async def _has_deadline_in_future(redis: RedisClient) -> bool:
    seconds, _ = await redis.time()
    return bool(await redis.zrangebyscore(names.readers(), seconds * 1000, "+inf"))


async def _deadline_passes(redis: RedisClient) -> None:
    await eventually(lambda: redis.zcard(names.readers()))
    [first] = (await read_scores(redis, names.readers())).values()

    async def is_past() -> bool:
        [now] = (await read_scores(redis, names.readers())).values()
        return now > first + 1000 * PATIENCE_S

    await eventually(is_past)
