"""When Redis goes away under open streams, they wait and go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import CHAT, bare_client, chat, read_events, text_of
from tests.support.programs.gateway_harness import announce, running_gateway
from tests.support.redis_servers.redis_proxy import RedisProxy


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_url) as proxy:
        yield proxy


async def test_a_redis_that_hangs_is_as_good_as_away(
    redis: RedisClient, redis_url: str, proxy: RedisProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.health.READY_WITHIN_S", 0.5)
    monkeypatch.setattr("penstock.gateway.directory.MAX_AGE_S", 0.0)
    go_on = asyncio.Event()

    async def in_two_parts(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("before ")
        await go_on.wait()
        await reply.chunk("after")
        await reply.end()

    await announce(redis)
    async with (
        ScriptedWorker(redis_url, in_two_parts),
        running_gateway(proxy.url, redis_timeout_s=3.0) as gateway,
        bare_client(gateway) as client,
        client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        events = read_events(response)
        read = [await anext(events)]
        proxy.is_answering.clear()
        await eventually(lambda: _is_not_ready(client))
        asked = [client.get(path) for path in ("/v1/models", "/v1/responses/resp_a", "/v1/files")]
        asked += [client.post(CHAT, json=chat(stream=is_streamed)) for is_streamed in (False, True)]
        assert {_refusal(answer) for answer in await asyncio.gather(*asked)} == {(503, "unavailable")}
        go_on.set()
        proxy.is_answering.set()
        assert text_of([*read, *[event async for event in events]]) == "before after"
        await eventually(lambda: _is_ready(client))


async def _is_not_ready(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/readiness")).status_code == 503


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/readiness")).status_code == 200


def _refusal(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("num_streams", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_open_streams_wait_and_go_on(
    redis: RedisClient, redis_url: str, proxy: RedisProxy, num_streams: int
) -> None:
    go_on = asyncio.Event()
    num_begun = num_said = 0

    async def in_two_parts(reply: ScriptedReply) -> None:
        nonlocal num_said
        await reply.own()
        await reply.chunk("before ")
        await go_on.wait()
        await reply.chunk("after")
        await reply.end()
        num_said += 1

    async def read(client: httpx2.AsyncClient, number: int) -> str:
        nonlocal num_begun
        headers = {"Idempotency-Key": str(number)} if number % 2 else {}
        async with client.stream("POST", CHAT, json=chat(stream=True), headers=headers) as response:
            assert response.status_code == 200
            events = read_events(response)
            read = [await anext(events)]
            while not text_of(read):
                read.append(await anext(events))
            num_begun += 1
            return text_of([*read, *[event async for event in events]])

    await announce(redis)
    limits = httpx2.Limits(max_connections=None)
    async with (
        ScriptedWorker(redis_url, in_two_parts) as worker,
        running_gateway(proxy.url, max_queue_length=2 * num_streams, abandon_after_s=1.0) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S, trust_env=False, limits=limits) as client,
    ):
        reading = [asyncio.create_task(read(client, number)) for number in range(num_streams)]
        await eventually(lambda: num_begun == num_streams)
        await proxy.stop()
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        go_on.set()
        await eventually(lambda: num_said == num_streams)
        assert not any(task.done() for task in reading)
        await proxy.start()
        assert set(await asyncio.gather(*reading)) == {"before after"}
        assert len(worker.taken) == num_streams
        # The one that was refused may be cancelled: nobody knows whether it had come to Redis.
        cancels = {keys.cancel("default", request.id or "") for request in worker.taken}
        assert not cancels & set(await redis.keys("penstock:*:cancel"))
