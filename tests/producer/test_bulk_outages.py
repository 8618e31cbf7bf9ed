"""`map` waits while Redis is away or takes no writes, and ends at once if there never was a Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.producer import AsyncClient, BulkResult, ConnectionLost, ReplyTimeout, ServerRefused
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedWorker, echo
from tests.support.redis_servers.redis_proxy import RedisProxy

PROMPTS = [f"p {number}" for number in range(6)]

Switch = Callable[[RedisClient, bool], Awaitable[object]]

REFUSALS: dict[str, Switch] = {
    "NOREPLICAS": lambda redis, is_on: redis.config_set("min-replicas-to-write", int(is_on)),
    "OOM": lambda redis, is_on: redis.config_set("maxmemory", int(is_on)),
    "READONLY": lambda redis, is_on: redis.execute_command(
        "REPLICAOF", *(("127.0.0.1", 1) if is_on else ("NO", "ONE"))
    ),
}
"""Refusals of a server by code, and how each is switched on and off."""


@pytest.fixture(params=["NOREPLICAS"])
async def refusing(request: pytest.FixtureRequest, redis: RedisClient) -> AsyncIterator[Switch]:
    """Switches a refusal on; it is off again at the end."""
    switch = REFUSALS[request.param]
    yield switch
    await switch(redis, False)


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_url) as proxy:
        yield proxy


@pytest.mark.parametrize("refusing", REFUSALS, indirect=True)
@pytest.mark.parametrize("is_fresh", [True, False])
async def test_it_waits_while_redis_takes_nothing(
    redis: RedisClient, redis_url: str, refusing: Switch, is_fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(redis_url) as client:
        if not is_fresh:
            await client.submit("before")
            await redis.flushall()
        await refusing(redis, True)
        done = asyncio.create_task(_all(client.map(PROMPTS, max_in_flight=4)))
        await eventually(lambda: len(_told(caplog)) == 1)
        await _have_been_tried(redis, 8)
        assert not done.done()
        await refusing(redis, False)
        async with ScriptedWorker(redis_url):
            assert [result.text for result in await done] == PROMPTS
    assert len(_told(caplog)) == 2  # that it waits, and that it goes on, however often it was tried


async def test_it_waits_while_redis_is_away(
    redis_url: str, proxy: RedisProxy, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def behave(reply: object) -> None:
        begun.set()
        await echo(reply)  # type: ignore[arg-type]

    async with ScriptedWorker(redis_url, behave) as worker, AsyncClient(proxy.url) as client:
        results = client.map(PROMPTS, max_in_flight=1)
        assert (await anext(results)).text == PROMPTS[0]
        await proxy.stop()
        done = asyncio.create_task(_all(results))
        await eventually(lambda: _told(caplog))
        await proxy.start()
        assert [result.text for result in await done] == PROMPTS[1:]
    assert len(worker.taken) == len(PROMPTS)


async def test_a_redis_that_stays_away_fails_each_prompt_of_its_own(proxy: RedisProxy) -> None:
    async with AsyncClient(proxy.url, reconnect_timeout_s=0.3) as client:
        await client.submit("before")
        await proxy.stop()
        results = await _all(client.map(PROMPTS))
    assert {type(result.error) for result in results} == {ConnectionLost}
    assert len(results) == len(PROMPTS)


async def test_a_redis_that_refuses_for_good_is_not_waited_for(redis: RedisClient, redis_url: str) -> None:
    await redis.execute_command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "+@all", "-xadd")
    try:
        async with AsyncClient(redis_url.replace("://", "://narrow:secret@")) as client:
            results = await _all(client.map(PROMPTS))
    finally:
        await redis.execute_command("ACL", "DELUSER", "narrow")
    assert [type(result.error) for result in results] == [ServerRefused] * len(PROMPTS)


async def test_the_time_out_of_a_prompt_bounds_its_wait(redis: RedisClient, redis_url: str, refusing: Switch) -> None:
    async with AsyncClient(redis_url) as client:
        await refusing(redis, True)
        results = await _all(client.map(PROMPTS, timeout=0.3))
    assert [type(result.error) for result in results] == [ReplyTimeout] * len(PROMPTS)


async def test_a_map_that_waits_ends_at_once_when_it_is_left(
    redis: RedisClient, redis_url: str, refusing: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(redis_url) as client:
        await refusing(redis, True)
        waiting = asyncio.create_task(_all(client.map(PROMPTS)))
        await eventually(lambda: _told(caplog))
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        await refusing(redis, False)
    assert not await redis.exists(keys.requests("default")) or not await redis.xlen(keys.requests("default"))


async def test_a_map_that_waits_ends_with_its_client(
    redis: RedisClient, redis_url: str, refusing: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    client = AsyncClient(redis_url)
    await refusing(redis, True)
    waiting = asyncio.create_task(_all(client.map(PROMPTS)))
    await eventually(lambda: _told(caplog))
    await client.close()
    assert [type(result.error) for result in await waiting] == [ConnectionLost] * len(PROMPTS)


async def test_a_map_whose_client_closes_while_it_sets_up_ends() -> None:
    async with NoRedis(is_listening=True) as silent:
        client = AsyncClient(silent.url)
        waiting = asyncio.create_task(_all(client.map(PROMPTS)))
        await eventually(lambda: silent.num_connections > 0)
        await client.close()
        with pytest.raises(ConnectionLost):
            await waiting


class NoRedis:
    """A server that takes connections, or none, and says nothing."""

    def __init__(self, *, is_listening: bool) -> None:
        self._is_listening = is_listening
        self.num_connections = 0

    async def __aenter__(self) -> NoRedis:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        if not self._is_listening:
            self._server.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while await reader.read(1024):
            pass
        writer.close()


@pytest.mark.parametrize("is_listening", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 64])
async def test_without_a_redis_it_raises_once_for_all(
    is_listening: bool, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.producer.patience.CONNECT_TIMEOUT_S", 0.5)
    async with NoRedis(is_listening=is_listening) as nowhere, AsyncClient(nowhere.url) as client:
        results = client.map([str(number) for number in range(40)], max_in_flight=max_in_flight)
        with pytest.raises(ConnectionLost):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        assert nowhere.num_connections <= 2  # that for commands, and the reader's


async def _have_been_tried(redis: RedisClient, num_more: int) -> None:
    """Waits until the server has refused `num_more` more commands."""

    async def num_refused() -> int:
        return int((await redis.info("stats"))["total_error_replies"])

    before = await num_refused()

    async def enough() -> bool:
        return await num_refused() >= before + num_more

    await eventually(enough)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "penstock.producer.patience"
    return [record.getMessage() for record in caplog.records if record.name == name and record.levelno >= logging.INFO]


async def _all(results: AsyncIterator[BulkResult]) -> list[BulkResult]:
    return [result async for result in results]
