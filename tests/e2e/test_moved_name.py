"""A managed Redis fails over by moving its name: connections that stay open to the demoted primary are dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx2 as httpx
import pytest
from gateway_harness import running_gateway
from moved_name import Demoted, MovingName
from patience import TEST_S, WAIT_S
from worker_harness import eventually, is_queue_empty, read_reply, running_worker

from penstock.producer import AsyncClient
from penstock.producer.redis import moves
from penstock.producer.redis.connection import RedisClient, connect, connect_blocking
from penstock.worker.chaos.fake_engine import FakeEngine, expected_text

TOKENS = 60
QUESTION = {"model": "q", "prompt": "x", "max_tokens": 3}


@pytest.fixture
async def names(redis_url: str) -> AsyncIterator[list[MovingName]]:
    """One for each process, which finds out by itself."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MovingName(redis_url)) for _ in range(4)]


@pytest.mark.parametrize("how", ["quiet", "unblocked", "loading", "reset"])
async def test_all_go_on_where_the_name_leads_to(names: list[MovingName], redis: RedisClient, how: Demoted) -> None:
    """`reader` only waits for what a stream brings: it has nothing to write."""
    engine = FakeEngine(step_s=0.002)
    of_worker, of_gateway, of_client, of_reader = names
    async with (
        running_worker(of_worker.url, engine, heartbeat_ttl_s=30) as worker,
        running_gateway(of_gateway.url) as gateway,
        AsyncClient(of_client.url, queue="q") as client,
        AsyncClient(of_reader.url, queue="q") as reader,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        await client.submit("x", id="before", max_tokens=TOKENS)
        async with reader.handle("before").stream() as chunks:
            texts = [(await anext(chunks)).text]
            assert (await http.post("/v1/completions", json=QUESTION)).status_code == 200
            engine.hold()
            for name in names:
                name.demote(how)
            if how != "reset":
                await eventually(lambda: not worker.service.readiness.is_ready)
            for name in names:
                name.move()
            engine.allow()
            await eventually(lambda: _is_served(http))
            after = await client.generate("y", id="after", max_tokens=TOKENS)
            texts += [chunk.text async for chunk in chunks]
        assert after.text == expected_text("y", "after", TOKENS)
        assert "".join(texts) == expected_text("x", "before", TOKENS)
        await eventually(lambda: worker.service.readiness.is_ready)
        await eventually(lambda: _is_ready(http))
        for request_id in ("before", "after"):
            reply = await read_reply(redis, request_id)
            assert (len(reply.tokens()), len(reply.owners)) == (TOKENS, 1)
        await eventually(lambda: is_queue_empty(redis))
        await eventually(lambda: not any(name.num_open_old for name in names))


async def _is_served(http: httpx.AsyncClient) -> bool:
    answer = await http.post("/v1/completions", json=QUESTION)
    assert answer.status_code in (200, 503)
    return answer.status_code == 200


async def _is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readiness")).status_code == 200


async def test_who_calls_after_the_move_notices_nothing(names: list[MovingName], redis: RedisClient) -> None:
    """What the old server refused was not executed, so it is sent again."""
    async with (
        running_worker(names[0].url, FakeEngine()),
        running_gateway(names[1].url) as gateway,
        AsyncClient(names[2].url, queue="q") as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        await client.generate("x", max_tokens=3)
        assert await _is_served(http)
        for name in names[1:]:
            name.demote("quiet")
            name.move()
        assert (await client.generate("y", id="y", max_tokens=TOKENS)).text == expected_text("y", "y", TOKENS)
        assert (await http.post("/v1/completions", json=QUESTION)).status_code == 200
        assert (await client.handle("y").cancel()) is None


async def test_one_of_many_that_are_refused_drops_all(names: list[MovingName], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a server that stays read-only is left alone in between."""
    name = names[0]
    clients = [connect(name.url, decode=False, retries=0) for _ in range(3)]
    blocking = connect_blocking(name.url, decode=False, block_s=1.0)
    async with AsyncExitStack() as stack:
        for client in (*clients, blocking):
            stack.push_async_callback(client.aclose)
            await client.ping()
        bundle = clients[0].connection_pool.connection_kwargs["line"].bundle()
        monkeypatch.setattr(moves, "EVERY_S", 10 * TEST_S)
        name.demote("quiet")
        for client in (*clients, *clients):
            with pytest.raises(Exception, match="read only"):
                await client.set("k", "v")
        assert bundle.age == 1
        name.move()
        monkeypatch.setattr(moves, "EVERY_S", 0.0)
        await eventually(lambda: _is_taken(clients[0]))
        assert await blocking.ping()
        await eventually(lambda: not name.num_open_old)


async def _is_taken(client: RedisClient) -> bool:
    try:
        return bool(await client.set("k", "v"))
    except Exception as error:
        assert "read only" in str(error)  # noqa: PT017
        return False
