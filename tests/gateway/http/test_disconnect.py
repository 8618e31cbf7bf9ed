"""Requests whose client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, until_cancelled
from tests.support.programs.gateway_client import CHAT, bare_client, chat, read_events
from tests.support.programs.gateway_harness import announce, running_gateway
from tests.support.redis_servers.streams import read_scores

KEY = {"Idempotency-Key": "k"}
QUICK_S = 0.5


async def nothing_yet(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.cancelled()
    await reply.end("cancelled")


async def never_taken(reply: ScriptedReply) -> None:
    """Leaves the request waiting in the queue."""


@pytest.fixture
async def worker(redis: RedisClient, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    await announce(redis)
    async with ScriptedWorker(redis_url, until_cancelled) as worker:
        yield worker


async def is_cancelled(redis: RedisClient, worker: ScriptedWorker) -> bool:
    request_id = worker.taken[0].id or ""
    status = await redis.hget(keys.state("default", request_id), "status")
    return bool(status == "done" or await redis.exists(keys.cancel("default", request_id)))


async def deadline_passes(redis: RedisClient) -> None:
    """Waits until the one request that is read would be abandoned, had its deadline not been put off meanwhile."""
    await eventually(lambda: redis.zcard(names.readers()))
    [(member, first)] = (await read_scores(redis, names.readers())).items()

    async def is_past() -> bool:
        return float(await redis.zscore(names.readers(), member) or 0) > first + 1000 * QUICK_S

    await eventually(is_past)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("behave", [never_taken, nothing_yet, until_cancelled])
async def test_a_request_without_a_key_is_cancelled_when_its_client_goes(
    redis: RedisClient,
    redis_url: str,
    worker: ScriptedWorker,
    behave: Callable[[ScriptedReply], Awaitable[None]],
    is_streamed: bool,
) -> None:
    worker.behave = behave
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(stream=is_streamed)))
        await eventually(lambda: worker.taken)
        asking.cancel()
        await eventually(lambda: is_cancelled(redis, worker))


async def test_one_that_ends_leaves_nothing_behind(redis: RedisClient, redis_url: str, worker: ScriptedWorker) -> None:
    async def answer(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("word")
        await eventually(lambda: redis.zcard(names.readers()))
        await reply.end()

    worker.behave = answer
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        for headers in ({}, KEY):
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
            await eventually(lambda: _is_forgotten(redis))
    assert not await redis.keys("penstock:*:cancel")


async def test_a_request_with_a_key_is_cancelled_once_nobody_has_read_it_for_a_while(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker
) -> None:
    async with running_gateway(redis_url, abandon_after_s=QUICK_S) as gateway, bare_client(gateway) as client:
        async with client.stream("POST", CHAT, json=chat(stream=True), headers=KEY) as response:
            events = read_events(response)
            await anext(events)
            await deadline_passes(redis)
            assert not await is_cancelled(redis, worker)
        await eventually(lambda: is_cancelled(redis, worker))
        await eventually(lambda: _is_forgotten(redis))


async def test_a_request_with_a_key_goes_on_while_anybody_reads_it(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker
) -> None:
    async with (
        running_gateway(redis_url, abandon_after_s=QUICK_S) as one,
        running_gateway(redis_url, abandon_after_s=QUICK_S) as other,
        bare_client(one, other) as (first, second),
    ):
        async with second.stream("POST", CHAT, json=chat(stream=True), headers=KEY) as response:
            events = read_events(response)
            await anext(events)
            async with first.stream("POST", CHAT, json=chat(stream=True), headers=KEY) as joined:
                await anext(read_events(joined))
            await deadline_passes(redis)
            assert not await is_cancelled(redis, worker)
        await eventually(lambda: is_cancelled(redis, worker))
    assert len(worker.taken) == 1


async def _is_forgotten(redis: RedisClient) -> bool:
    return await redis.zcard(names.readers()) == 0
