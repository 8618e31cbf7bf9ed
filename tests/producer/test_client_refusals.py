"""When Redis refuses, each call of the client raises an error of ours, in one line, or waits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from redis.backoff import ExponentialWithJitterBackoff

from penstock.producer import AsyncClient, CallTimedOut, Client, ConnectionLost, Handle, PenstockError, ServerRefused
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

ANSWERS = (*PASSING.values(), FULL, *REFUSED.values())
WITHOUT_REDIS = {"close", "handle", "on"}  # methods of a client and a handle
OPTIONS: dict[str, Any] = {"max_tokens": 3, "temperature": 0}

Call = Callable[[AsyncClient], Awaitable[object]]


async def _streamed(client: AsyncClient) -> object:
    return [chunk async for chunk in client.stream("x", **OPTIONS)]


async def _mapped(client: AsyncClient) -> object:
    results = [result async for result in client.map(["x", "y"], **OPTIONS)]
    for result in results:
        assert result.text
    return results


async def _known(client: AsyncClient) -> Handle:
    """Returns the handle of a request that another client sent and that ran to its end."""
    return client.handle("known")


async def _followed(client: AsyncClient) -> object:
    handle = await _known(client)
    first = [chunk async for chunk in handle.stream()]
    return [chunk async for chunk in handle.stream(after=first[0].entry_id)]


CALLS: Mapping[str, Call] = {
    "submit": lambda client: client.submit("x", **OPTIONS),
    "stream": _streamed,
    "generate": lambda client: client.generate("x", **OPTIONS),
    "map": _mapped,
    "queue_status": lambda client: client.queue_status(),
    "count_tokens": lambda client: client.count_tokens("x"),
    "tokenize": lambda client: client.tokenize("x"),
    "detokenize": lambda client: client.detokenize([104]),
    "validate": lambda client: client.validate("x"),
    "model_card": lambda client: client.model_card(),
    "queues": lambda client: client.queues(),
    "Handle.stream": _followed,
    "Handle.result": lambda client: client.handle("known").result(),
    "Handle.cancel": lambda client: client.handle("known").cancel(),
    "Handle.state": lambda client: client.handle("known").state(),
}


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_every_call_is_here() -> None:
    assert CALLS.keys() == (public(AsyncClient) - WITHOUT_REDIS) | {f"Handle.{name}" for name in public(Handle)}
    assert public(Client) <= public(AsyncClient)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets retries follow each other at once."""
    monkeypatch.setattr(ExponentialWithJitterBackoff, "compute", lambda *_: 0.001)
    for name in (
        "reading.line.MAX_BACKOFF_S", "reading.line.WAKE_RETRY_S", "calls.FIRST_BACKOFF_S", "calls.MAX_BACKOFF_S",
        "patience.FIRST_DELAY_S", "patience.MAX_DELAY_S",
    ):  # fmt: skip
        monkeypatch.setattr(f"penstock.producer.{name}", 0.002)


async def test_each_call_meets_each_refusal_and_then_works(redis: RedisClient, redis_url: str, quick: None) -> None:
    async with running_worker(redis_url):
        async with AsyncClient(redis_url, queue="q") as direct:
            await direct.generate("x", id="known", **OPTIONS)
        for name, call in CALLS.items():
            async with RefusingProxy(redis_url) as proxy, AsyncClient(proxy.url, queue="q") as client:
                proxy.refuse_in_turn(ANSWERS)
                async with asyncio.timeout(WAIT_S):
                    while not await _works(name, call, client):
                        pass
                left = {sent for sent in proxy.seen if proxy.refused[sent] and proxy.refused[sent] < len(ANSWERS)}
                assert left <= {"EXISTS", "EXPIRE", "GET", "XADD", "XREAD", "XTRIM", "DEL", "SET", "SADD"}, (
                    name,
                    left,
                    proxy.refused,
                )
                assert proxy.refused.total() >= len(ANSWERS), name


async def _works(name: str, call: Call, client: AsyncClient) -> bool:
    try:
        await call(client)
    except ServerRefused as error:
        _check_told(error)
        return False
    except (ConnectionLost, CallTimedOut) as error:
        raise AssertionError(f"{name}: a server that refuses is not away: {error}") from error
    return True


def _check_told(error: PenstockError) -> None:
    assert "\n" not in str(error)
    assert "Redis at redis://127.0.0.1" in str(error) or "can't be read" in str(error)


async def test_a_reader_waits_until_it_is_over(redis: RedisClient, redis_url: str, quick: None) -> None:
    async with (
        running_worker(redis_url, FakeEngine(step_s=0.01)),
        RefusingProxy(redis_url) as proxy,
        AsyncClient(proxy.url, queue="q") as client,
        AsyncClient(redis_url, queue="q") as direct,
    ):
        for answer in ANSWERS:
            chunks = client.stream("x", max_tokens=60, temperature=0)
            read = [await anext(chunks)]
            proxy.refuse(answer)
            proxy.cut()
            reading = asyncio.create_task(_rest(chunks))
            before = proxy.refused.total()
            await eventually(lambda: proxy.refused.total() >= before + 10)  # noqa: B023
            assert not reading.done(), answer
            proxy.allow()
            read += await reading
            whole = await direct.handle(chunks.request_id).result()
            assert "".join(chunk.text for chunk in read) == whole.text


async def _rest(chunks: Any) -> list[Any]:
    return [chunk async for chunk in chunks]
