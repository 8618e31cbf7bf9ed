"""A managed Redis fails over by moving its name: connections still open to the demoted primary are dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from redis.asyncio import Redis

from penstock.cli.top import _Watch
from penstock.cli.watching.board import Board
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.redis import moves
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, connect, connect_blocking
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import is_queue_empty, read_reply, running_worker
from tests.support.redis_servers.moved_name import Demoted, MovingName
from tests.support.redis_servers.nodes import proxied_nodes, sentinel

TOKENS = 60
QUESTION = {"model": "q", "prompt": "x", "max_tokens": 3}


@pytest.fixture
async def names(redis_url: str) -> AsyncIterator[list[MovingName]]:
    """A name for each process, which finds out by itself."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MovingName(redis_url)) for _ in range(4)]


@pytest.mark.parametrize("how", ["quiet", "unblocked", "loading", "reset"])
async def test_all_go_on_where_the_name_leads_to(names: list[MovingName], redis: RedisClient, how: Demoted) -> None:
    def demote() -> None:
        for name in names:
            name.demote(how)

    def move() -> None:
        for name in names:
            name.move()

    await all_go_on([name.url for name in names], names, demote, move)
    for request_id in ("before", "after"):
        reply = await read_reply(redis, request_id)
        assert (len(reply.tokens()), len(reply.owners)) == (TOKENS, 1)
    await eventually(lambda: is_queue_empty(redis))


@pytest.mark.parametrize("how", ["quiet", "unblocked"])
async def test_all_go_on_where_a_sentinel_leads_to(
    redis_url: str, redis: RedisClient, tmp_path: Path, how: Demoted
) -> None:
    async with MovingName(redis_url) as old, MovingName(redis_url) as new:
        with sentinel(tmp_path, old.port) as port:
            async with aclosing(Redis(port=port)) as asked:
                moving: list[asyncio.Task[object]] = []

                async def lead_to_new() -> None:
                    await asked.sentinel_remove("service")
                    await asked.sentinel_monitor("service", "127.0.0.1", new.port, 1)

                url = f"redis+sentinel://127.0.0.1:{port}/service/0"
                # each is to find out by itself: what leads to one place is dropped together
                urls = [url.replace("127.0.0.1", host) for host in ("127.0.0.1", "localhost", "127.1", "127.0.1")]
                await all_go_on(
                    urls,
                    [old],
                    lambda: old.demote(how),
                    lambda: moving.append(asyncio.create_task(lead_to_new())),
                )
    assert new.seen["XREADGROUP"]


async def test_all_go_on_where_a_cluster_leads_to(redis_cluster: list[EmbeddedServer]) -> None:
    """The name of each node moves."""
    async with proxied_nodes(redis_cluster, MovingName) as (url, nodes):

        def demote() -> None:
            for node in nodes:
                node.demote("quiet")

        def move() -> None:
            for node in nodes:
                node.move()

        await all_go_on([url] * 4, nodes, demote, move)


async def all_go_on(
    urls: Sequence[str], names: Sequence[MovingName], demote: Callable[[], object], move: Callable[[], object]
) -> None:
    """Checks a worker, a gateway, a client that calls, and one that only waits for a stream, by these URLs."""
    engine = FakeEngine(step_s=0.002)
    of_worker, of_gateway, of_client, of_reader = urls
    async with (
        running_worker(of_worker, engine, heartbeat_ttl_s=30) as worker,
        running_gateway(of_gateway) as gateway,
        AsyncClient(of_client, queue="q") as client,
        AsyncClient(of_reader, queue="q") as reader,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        await client.submit("x", id="before", max_tokens=TOKENS)
        async with reader.handle("before").stream() as chunks:
            texts = [(await anext(chunks)).text]
            await eventually(lambda: _is_served(http))  # it listens before it knows what it serves
            engine.hold()
            demote()
            await eventually(lambda: not worker.service.readiness.is_ready or not _num_old(names))
            move()
            engine.allow()
            await eventually(lambda: _is_served(http))
            after = await client.generate("y", id="after", max_tokens=TOKENS)
            texts += [chunk.text async for chunk in chunks]
        assert after.text == expected_text("y", "after", TOKENS)
        assert "".join(texts) == expected_text("x", "before", TOKENS)
        await eventually(lambda: worker.service.readiness.is_ready)
        await eventually(lambda: _is_ready(http))


def _num_old(names: Sequence[MovingName]) -> int:
    return sum(name.num_open_old for name in names)


async def _is_served(http: httpx.AsyncClient) -> bool:
    answer = await http.post("/v1/completions", json=QUESTION)
    assert answer.status_code in (200, 503)
    return answer.status_code == 200


async def _is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readiness")).status_code == 200


@pytest.mark.parametrize("how", ["quiet", "unblocked"])
async def test_under_load_nothing_is_lost_or_doubled(names: list[MovingName], redis: RedisClient, how: Demoted) -> None:
    """Half of the requests come by a gateway, half by a client; the name moves while all are at work."""
    num_each = 12
    async with (
        running_worker(names[0].url, FakeEngine(max_num_seqs=8, step_s=0.005), heartbeat_ttl_s=30),
        running_worker(names[1].url, FakeEngine(max_num_seqs=8, step_s=0.005), heartbeat_ttl_s=30),
        running_gateway(names[2].url) as gateway,
        AsyncClient(names[3].url, queue="q") as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        asked = [asyncio.create_task(_complete(http, number)) for number in range(num_each)]
        called = [
            asyncio.create_task(client.generate("y", id=f"y{number}", max_tokens=TOKENS)) for number in range(num_each)
        ]
        for number in range(num_each // 2):  # some have begun by then, and some have not
            await eventually(lambda: redis.exists(keys.reply("q", f"y{number}")))  # noqa: B023
        for name in names:
            name.demote(how)
        await eventually(lambda: any(name.num_refused_old for name in names))
        late = asyncio.create_task(client.generate("y", id="late", max_tokens=TOKENS))
        for name in names:
            name.move()
        async with asyncio.timeout(WAIT_S):
            for number, text in enumerate(await asyncio.gather(*asked)):
                assert text == expected_text(str(number), number, TOKENS)
            for result in await asyncio.gather(*called, late):
                assert result.text == expected_text("y", result.request_id, TOKENS)
    replies = [key async for key in redis.scan_iter(match=keys.reply("q", "*"))]
    assert len(replies) == 2 * num_each + 1
    for number in range(num_each):
        reply = await read_reply(redis, f"y{number}")
        assert len(reply.tokens()) == TOKENS
    assert await is_queue_empty(redis)


async def _complete(http: httpx.AsyncClient, number: int) -> str:
    """Sends a request again, with the same key, while the gateway has no server that takes writes."""
    body = {"model": "q", "prompt": str(number), "seed": number, "max_tokens": TOKENS}
    while True:
        answer = await http.post("/v1/completions", json=body, headers={"Idempotency-Key": f"x{number}"})
        if answer.status_code == 200:
            return str(answer.json()["choices"][0]["text"])
        assert answer.status_code == 503
        await asyncio.sleep(0.05)


async def test_who_calls_after_the_move_notices_nothing(names: list[MovingName], redis: RedisClient) -> None:
    """A command that the old server refused was not executed, so it is sent again."""
    async with (
        running_worker(names[0].url, FakeEngine()),
        running_gateway(names[1].url) as gateway,
        AsyncClient(names[2].url, queue="q") as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        await client.generate("x", max_tokens=3)
        await eventually(lambda: _is_served(http))
        for name in names[1:]:
            name.demote("quiet")
            name.move()
        assert (await client.generate("y", id="y", max_tokens=TOKENS)).text == expected_text("y", "y", TOKENS)
        assert (await http.post("/v1/completions", json=QUESTION)).status_code == 200
        await client.handle("y").cancel()


async def test_one_of_many_that_are_refused_drops_all(names: list[MovingName], monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile, a server that stays read-only is left alone."""
    name = names[0]
    clients = [connect(name.url, decode=False, retries=0) for _ in range(3)]
    blocking = connect_blocking(name.url, decode=False, block_s=1.0)
    async with AsyncExitStack() as stack:
        for client in (*clients, blocking):
            stack.push_async_callback(client.aclose)
            await client.ping()
        dropped: Counter[object] = Counter()
        drop = moves.drop_connections

        def counted(redis: RedisClient, **options: Any) -> None:
            dropped[redis] += 1
            drop(redis, **options)

        monkeypatch.setattr(moves, "drop_connections", counted)
        monkeypatch.setattr(moves, "EVERY_S", 3600.0)
        name.demote("quiet")
        for client in (*clients, *clients):
            with pytest.raises(Exception, match="read only"):
                await client.set("k", "v")
        assert dropped == dict.fromkeys((*clients, blocking), 1)
        name.move()
        assert isinstance(clients[0], Redis)
        bundle = clients[0].connection_pool.connection_kwargs["line"].bundle()
        bundle._drop(None)  # it is due in an hour
        assert await clients[0].set("k", "v")
        assert await blocking.ping()
        await eventually(lambda: not name.num_open_old)


async def test_top_shows_what_is_where_the_name_leads_to(names: list[MovingName]) -> None:
    """`top` only reads, and the demoted server would answer reads for ever."""
    name = names[0]
    async with aclosing(connect(name.url, decode=False, retries=0)) as redis:
        watch = _Watch(redis, parse_url(name.url), "q", 1.0, Board(await look(redis, "q")))
        name.demote("quiet")
        name.move()
        assert name.num_open_old
        await watch._ask_witness()
        await look(redis, "q")
        await eventually(lambda: not name.num_open_old)
