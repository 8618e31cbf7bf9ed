"""`durable=True`: enqueueing returns once a crash of the server can't lose the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Client, NotDurable, ServerRefused
from penstock.protocol import keys
from penstock.protocol.redis import durable
from penstock.protocol.redis.connection import RedisClient, connect
from tests.support.programs.fakes import LossyProxy, ScriptedWorker
from tests.support.redis_servers.servers import SERVERS, cluster_arguments, form_cluster

KNOWS = [name for name in SERVERS if name != "redis-server"]  # 7.0 does not have WAITAOF
pytestmark = [pytest.mark.skipif(not KNOWS, reason="no server with WAITAOF"), pytest.mark.every_server]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that keeps its data, a second late."""
    arguments = ("--appendfsync", "everysec")
    with EmbeddedServer(SERVERS[KNOWS[0]], data_dir=tmp_path, arguments=arguments) as server:
        yield server


@pytest.fixture
async def admin(server: EmbeddedServer) -> AsyncIterator[RedisClient]:
    client = connect(server.url, decode=True, retries=10)
    yield client
    await client.aclose()


async def test_a_confirmed_request_survives_a_crash(server: EmbeddedServer, admin: RedisClient) -> None:
    async with AsyncClient(server.url, durable=True) as client:
        handle = await client.submit("x")
        again = await client.submit("x", id=handle.id)
        server.kill()
        server.start()
        assert again.id == handle.id
        assert await admin.xlen(keys.requests("default")) == 1
        async with ScriptedWorker(server.url):
            assert (await handle.result()).text == "x"


def test_the_blocking_client_has_it_too(server: EmbeddedServer) -> None:
    with Client(server.url, durable=True) as client:
        client.submit("x")


async def test_a_lost_answer_is_no_confirmation(server: EmbeddedServer, admin: RedisClient) -> None:
    """The pair of write and wait is sent again as a whole: on a new connection WAITAOF alone would wait for nothing."""
    async with LossyProxy(server.port) as proxy, AsyncClient(proxy.url, durable=True) as client:
        await client.submit("warm-up")
        proxy.lose_next_answer_to(b"WAITAOF")
        await client.submit("x")
    stats = await admin.info("commandstats")
    assert stats["cmdstat_expire"]["calls"] == 3
    assert await admin.xlen(keys.requests("default")) == 2


async def test_no_fsync_is_no_confirmation(
    server: EmbeddedServer, admin: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "CONFIRM_TIMEOUT_MS", 100)
    await admin.config_set("appendfsync", "no")
    async with AsyncClient(server.url, durable=True) as client:
        with pytest.raises(NotDurable, match=r"r1 is enqueued, .* no fsync within 0\.1 s"):
            await client.submit("x", id="r1")
        await admin.config_set("appendfsync", "always")
        await client.submit("x", id="r1")
    assert await admin.xlen(keys.requests("default")) == 1


async def test_a_server_that_keeps_nothing_is_refused(redis_url: str, redis: RedisClient) -> None:
    """Redis 7.0 does not know the command; the others are started without an append-only file."""
    async with AsyncClient(redis_url, durable=True) as client:
        with pytest.raises(ServerRefused, match=r"unknown command|appendonly is disabled"):
            await client.submit("x")
    assert await redis.xlen(keys.requests("default")) == 0


async def test_an_append_only_file_that_was_turned_off_is_told(server: EmbeddedServer, admin: RedisClient) -> None:
    async with AsyncClient(server.url, durable=True) as client:
        await client.submit("x")
        await admin.config_set("appendonly", "no")
        with pytest.raises(NotDurable, match="appendonly is disabled"):
            await client.submit("x")


async def test_on_a_cluster(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            server = EmbeddedServer(SERVERS[KNOWS[0]], data_dir=folder, arguments=cluster_arguments())
            servers.append(stack.enter_context(server))
        form_cluster(servers)
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        async with AsyncClient(url, durable=True) as client:
            handles = await asyncio.gather(*(client.submit(str(number)) for number in range(20)))
            assert len({handle.id for handle in handles}) == 20
