"""Connections that die silently are all found at once; slow ones are left alone."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis import silence
from penstock.protocol.redis.connection import RedisClient, connect, connect_blocking
from penstock.protocol.redis.pipeline import execute_one
from penstock.protocol.redis.silence import AnswerWait, Watched, blocking
from penstock.protocol.redis.streams import read_streams
from tests.support.patience import TEST_S, WAIT_S, eventually
from tests.support.redis_servers.forwarding import Trickling
from tests.support.redis_servers.nodes import sentinel
from tests.support.redis_servers.refusing_proxy import RefusingProxy

NUM = 8


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RefusingProxy]:
    async with RefusingProxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_S", "LATE_S", "GRACE_S", "ASK_EVERY_S"):
        monkeypatch.setattr(silence, name, 0.1)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns a function that gives the warnings about dead connections so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [each.getMessage() for each in caplog.records if each.name == silence.__name__]


async def opened(client: RedisClient, num: int = NUM) -> list[Watched]:
    """Returns `num` connections that have been used and are idle."""
    assert isinstance(client, Redis)
    pool: Any = client.connection_pool
    made = [await pool.get_connection() for _ in range(num)]
    for each in made:
        await each.send_command("ECHO", "x")
        await each.read_response()
        await pool.release(each)
    return made


async def test_one_that_is_dead_tells_of_all(proxy: RefusingProxy, quick: None, said: Callable[[], list[str]]) -> None:
    async with aclosing(connect(proxy.url, decode=False)) as client:
        made = await opened(client)
        assert len(made) == proxy.num_links == NUM
        proxy.forget()
        async with asyncio.timeout(WAIT_S):
            assert await client.echo("x") == b"x"
            assert await asyncio.gather(*(client.echo("y") for _ in range(NUM))) == [b"y"] * NUM
        assert said()[0].startswith(f"{NUM} connections to Redis were dead: silent for ")
        assert proxy.seen["PING"] >= 1


async def test_clients_of_one_process_learn_from_each_other(proxy: RefusingProxy, quick: None) -> None:
    """A read that may block for long learns of its connection's death from another client's command."""
    async with (
        aclosing(connect(proxy.url, decode=False)) as client,
        aclosing(connect_blocking(proxy.url, decode=False, block_s=TEST_S)) as reader,
    ):
        await opened(client, 1)
        reading = asyncio.create_task(read_streams(reader, {"s": "0-0"}, count=1, block_s=TEST_S))
        await eventually(lambda: proxy.seen["XREAD"] == 1)
        proxy.forget()
        async with asyncio.timeout(WAIT_S):
            await client.echo("x")
            with pytest.raises(exceptions.ConnectionError, match="the connection was dead: silent for"):
                await reading


async def test_a_blocking_read_is_late_some_time_after_it_should_have_ended(proxy: RefusingProxy, quick: None) -> None:
    async with aclosing(connect_blocking(proxy.url, decode=False, block_s=0.1)) as reader:
        await read_streams(reader, {"s": "0-0"}, count=1, block_s=0.1)
        proxy.forget()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(exceptions.ConnectionError, match="the connection was dead"):
                await read_streams(reader, {"s": "0-0"}, count=1, block_s=0.1)


def test_what_the_server_may_leave_unanswered_is_not_late() -> None:
    command, read = AnswerWait(0.0), AnswerWait(20.0)
    command.begin()
    read.begin()
    assert command.due_s(1.0) - (command.since_s or 0) == pytest.approx(silence.ANSWER_S)
    assert read.due_s(1.0) - (read.since_s or 0) == pytest.approx(20.0 + silence.LATE_S)
    with blocking(5.0):
        command.begin()
    assert command.due_s(2.0) - (command.since_s or 0) == pytest.approx(2 * (5.0 + silence.LATE_S))


async def test_a_server_that_answers_nobody_is_slow(
    proxy: RefusingProxy, quick: None, said: Callable[[], list[str]]
) -> None:
    async with aclosing(connect(proxy.url, decode=False)) as client:
        await opened(client)
        proxy.is_answering.clear()
        asked = [asyncio.ensure_future(client.echo("x")) for _ in range(NUM)]
        await eventually(lambda: proxy.seen["PING"] >= 2)  # two new connections had no answer either
        proxy.is_answering.set()
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*asked) == [b"x"] * NUM
        assert proxy.seen["ECHO"] == 2 * NUM  # nothing was sent twice
        assert not said()


async def test_who_is_left_alone_on_a_server_that_answers_others_is_cut_off_less_and_less(
    proxy: RefusingProxy, quick: None, said: Callable[[], list[str]]
) -> None:
    async with aclosing(connect(proxy.url, decode=False, retries=0)) as client:
        proxy.hold("GET")
        for _ in range(3):
            with pytest.raises(exceptions.ConnectionError, match="the connection was dead"):
                await client.get("k")
        watch = next(each for each in silence._watches.values() if each.loop is asyncio.get_running_loop())
        assert watch._patience == silence.MOST_PATIENT
        assert len(said()) == 3


async def test_a_death_teaches_patience_with_what_was_made_since(
    proxy: RefusingProxy, redis_url: str, quick: None
) -> None:
    """Nodes of a cluster are found dead one by one: connections not yet closed may have died with the first."""
    async with (
        RefusingProxy(redis_url) as other,
        aclosing(connect(proxy.url, decode=False)) as client,
        aclosing(connect_blocking(other.url, decode=False, block_s=TEST_S)) as reader,
    ):
        kwargs: Any = client.connection_pool.connection_kwargs  # type: ignore[union-attr]
        reader.connection_pool.connection_kwargs["deployment"] = kwargs["deployment"]  # type: ignore[union-attr]
        [dead] = await opened(client, 1)
        reading = asyncio.create_task(read_streams(reader, {"s": "0-0"}, count=1, block_s=TEST_S))
        await eventually(lambda: other.seen["XREAD"] == 1)
        [old] = cast("set[Watched]", reader.connection_pool._in_use_connections)  # type: ignore[union-attr]
        proxy.forget()
        async with asyncio.timeout(WAIT_S):
            await client.echo("x")
        watch = silence.SilenceWatch.of(kwargs["deployment"])
        dead.wait.begin()
        assert not reading.done()
        assert watch._late_s(old) == pytest.approx((old.wait.since_s or 0.0) + TEST_S + silence.LATE_S)
        assert watch._late_s(dead) == pytest.approx((dead.wait.since_s or 0.0) + 2 * silence.ANSWER_S)
        dead.wait.since_s = None
        other.cut()
        with pytest.raises(exceptions.ConnectionError):
            await reading


async def test_what_is_sent_into_a_connection_that_takes_no_more_is_sent_again(
    proxy: RefusingProxy, quick: None
) -> None:
    body = bytes(16 << 20)
    async with aclosing(connect(proxy.url, decode=False)) as client:
        await opened(client, 1)
        proxy.forget(reads_on=False)
        async with asyncio.timeout(WAIT_S):
            await client.set("k", body)
            assert await client.strlen("k") == len(body)


async def test_what_is_on_its_way_is_not_late(proxy: RefusingProxy, quick: None) -> None:
    """A connection over which some bytes came since it was asked about gets more time."""
    async with aclosing(connect(proxy.url, decode=False)) as client:
        [made] = await opened(client, 1)
        proxy.hold("GET")
        asked = asyncio.ensure_future(client.get("k"))
        await eventually(lambda: proxy.seen["GET"] == 1)
        unsent = iter(range(10**9, 0, -1))
        made.unsent = lambda: next(unsent)  # type: ignore[method-assign]
        await eventually(lambda: proxy.seen["PING"] >= 3)
        assert not asked.done()
        proxy.cut()
        proxy.hold("")
        async with asyncio.timeout(WAIT_S):
            await asked


async def test_an_answer_that_trickles_is_not_late(
    redis: RedisClient, redis_server: EmbeddedServer, quick: None, said: Callable[[], list[str]]
) -> None:
    await redis.set("x", "y" * 40)
    async with Trickling("127.0.0.1", redis_server.port, [1], pause_s=silence.ANSWER_S / 10) as proxy:
        client = connect(f"redis://127.0.0.1:{proxy.port}", decode=True)
        try:
            assert await client.get("x") == "y" * 40  # it takes four times as long as an answer may
        finally:
            await client.aclose()
    assert said() == []


async def test_a_half_closed_connection_is_not_used(proxy: RefusingProxy) -> None:
    async with (
        aclosing(connect(proxy.url, decode=False, retries=0)) as client,
        aclosing(connect_blocking(proxy.url, decode=False, block_s=TEST_S)) as reader,
    ):
        await opened(client)
        reading = asyncio.create_task(read_streams(reader, {"s": "0-0"}, count=1, block_s=TEST_S))
        await eventually(lambda: proxy.seen["XREAD"] == 1)
        proxy.half_close()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(exceptions.ConnectionError):
                await reading
        assert await client.echo("x") == b"x"


@pytest.mark.parametrize("ask", [lambda client: client.get("k"), lambda client: execute_one(client, ("GET", "k"))])
async def test_what_the_kernel_gives_up_is_a_lost_connection(
    proxy: RefusingProxy, ask: Callable[[RedisClient], Awaitable[bytes]]
) -> None:
    """The error is a TimeoutError, which the Redis library takes for its caller's and answers with None. Over an idle
    connection nobody hears of it.
    """
    async with aclosing(connect(proxy.url, decode=False, retries=0)) as client:
        [made] = await opened(client, 1)
        await client.set("k", "v")
        given_up(made)
        assert await ask(client) == b"v"
        assert proxy.num_links == 2
        proxy.is_answering.clear()
        asking = asyncio.ensure_future(ask(client))
        await eventually(lambda: made.wait.since_s is not None)
        given_up(made)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(exceptions.ConnectionError, match="timed out"):
                await asking


def given_up(connection: Watched) -> None:
    """Ends a connection as TCP_USER_TIMEOUT does, or unanswered keepalive."""
    transport: Any = connection._writer.transport  # type: ignore[union-attr]
    transport._force_close(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))


async def test_what_was_idle_for_long_is_made_anew(
    proxy: RefusingProxy, redis_cluster_url: str, tmp_path: Path
) -> None:
    with sentinel(tmp_path, proxy.port) as port:
        for url in (proxy.url, redis_cluster_url, f"redis+sentinel://127.0.0.1:{port}/service"):
            async with aclosing(connect(url, decode=True, retries=20)) as client:
                await client.get("k")
                ids = [await client.execute_command("CLIENT ID", **_to_node(client)) for _ in range(2)]
                assert ids[0] == ids[1]
                for each in _connections(client):
                    each._max_idle_s = 0.0
                assert await client.execute_command("CLIENT ID", **_to_node(client)) != ids[0]


def _connections(client: Any) -> list[Watched]:
    if isinstance(client, RedisCluster):
        return [cast("Watched", each) for node in client.get_nodes() for each in node._connections]
    return list(client.connection_pool._available_connections)


def _to_node(client: Any) -> dict[str, Any]:
    return {"target_nodes": client.get_node_from_key("k")} if isinstance(client, RedisCluster) else {}


async def test_no_number_of_deaths_leaves_anything_behind(proxy: RefusingProxy, quick: None) -> None:
    async with aclosing(connect(proxy.url, decode=False)) as client:
        for num_deaths in range(6):
            await opened(client)
            for watch in silence._watches.values():
                watch._patience = 1.0
            if num_deaths == 2:
                before = _held()
            proxy.forget()
            async with asyncio.timeout(WAIT_S):
                await client.echo("x")
        await opened(client)
        after = _held()
    assert after == before


def _held() -> tuple[int, int, int]:
    """Returns the numbers of open connections to Redis, of watches, and of connections that the watches look after."""
    gc.collect()
    of_loop = [each for each in silence._watches.values() if each.loop is asyncio.get_running_loop()]
    kept = [each for watch in of_loop for each in watch._connections]
    return sum(each.is_connected for each in kept), len(of_loop), len(kept)


async def test_the_kernel_watches_too(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aclosing(connect(redis_url, decode=False)) as client:
        [made] = await opened(client, 1)
        used = made._writer.get_extra_info("socket")  # type: ignore[union-attr]
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
            if hasattr(socket, name):
                assert used.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == silence._KEEP_ALIVE[name]
    monkeypatch.setattr(
        silence, "_KEEP_ALIVE", {"TCP_OF_TOMORROW": 1, "TCP_MAXSEG": -1}
    )  # the kernel refuses the second
    async with aclosing(connect(redis_url, decode=False)) as client:
        assert await client.echo("x") == b"x"
