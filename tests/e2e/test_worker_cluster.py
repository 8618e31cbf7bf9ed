"""Producer and workers on a three-node Redis Cluster: every script, pipeline and read keeps to one slot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as BlockingRedis
from redis import exceptions

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, RequestRefused
from penstock.protocol import keys
from penstock.protocol.ids import slot_of
from penstock.protocol.operations import dead_letters
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.draining import presence, tell_to_drain
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import eventually
from tests.support.programs.worker_harness import running_worker
from tests.support.programs.worker_process import WorkerProcess


@pytest.fixture
async def redis(redis_cluster_url: str) -> AsyncIterator[RedisClient]:
    client = connect(redis_cluster_url, decode=True)
    yield client
    await client.aclose()


async def is_queue_empty(redis: RedisClient) -> bool:
    if await redis.xlen(keys.requests("q")):
        return False
    return int((await redis.xpending(keys.requests("q"), keys.GROUP))["pending"]) == 0


async def test_two_workers_serve_a_queue(redis_cluster_url: str, redis: RedisClient) -> None:
    engines = [FakeEngine(step_s=0.002, max_num_seqs=8) for _ in range(2)]
    async with (
        running_worker(redis_cluster_url, engines[0]),
        running_worker(redis_cluster_url, engines[1]),
        AsyncClient(redis_cluster_url, queue="q") as client,
    ):
        ids = [f"r{number}" for number in range(40)]  # in many slots, so on all nodes
        replies = await asyncio.gather(*(client.generate("hi", id=each, max_tokens=30, n=2) for each in ids))
        by_slot = await asyncio.gather(*(client.generate("hi", max_tokens=5) for _ in range(10)))
        await eventually(lambda: is_queue_empty(redis))
    for reply in replies:
        assert [choice.text for choice in reply.choices] == [
            expected_text("hi", reply.request_id, 30, index) for index in (0, 1)
        ]
    assert len({slot_of(reply.request_id) for reply in by_slot}) == 1
    assert all(engine.prefilled for engine in engines)


async def test_kill_reclaim_and_cancel(redis_cluster_url: str, redis: RedisClient, tmp_path: Path) -> None:
    async with AsyncClient(redis_cluster_url, queue="q") as client:
        with WorkerProcess(redis_cluster_url, tmp_path / "log", engine={"step_s": 0.005}, name="victim") as victim:
            handles = [await client.submit(f"p{number}", id=f"k{number}", max_tokens=200) for number in range(6)]
            endless = await client.submit("endless", max_tokens=10**6)
            for handle in (*handles, endless):
                async with handle.stream() as chunks:
                    await anext(chunks)
            victim.kill()
        assert await endless.state() in ("running", "lost")
        await endless.cancel()
        async with running_worker(redis_cluster_url, name="heir") as heir:
            replies = await asyncio.gather(*(handle.result() for handle in handles))
            assert (await endless.result()).finish_reason == "cancelled"
            assert heir.service.metrics.reclaimed._value.get() == 7
            await eventually(lambda: is_queue_empty(redis))
            await eventually(lambda: _consumers(redis, {"heir"}))
    for number, reply in enumerate(replies):
        assert reply.text == expected_text(f"p{number}", f"k{number}", 200)
        assert await redis.hmget(keys.state("q", f"k{number}"), "crashes", "worker") == ["1", "heir"]


async def _consumers(redis: RedisClient, names: set[str]) -> bool:
    consumers: Any = await redis.xinfo_consumers(keys.requests("q"), keys.GROUP)
    return {consumer["name"] for consumer in consumers} - {keys.UNOWNED, keys.WAITING} == names


async def _is_live(redis: RedisClient, worker: str) -> bool:
    return worker in {each.name for each in (await look(redis, "q")).workers if each.is_live}


async def test_drain_over_redis_hands_back(redis_cluster_url: str) -> None:
    async with (
        AsyncClient(redis_cluster_url, queue="q") as client,
        contextlib.aclosing(connect(redis_cluster_url, decode=False)) as raw,
        running_worker(redis_cluster_url, FakeEngine(step_s=0.005), name="first", drain_timeout_s=0.1) as first,
    ):
        handle = await client.submit("x", max_tokens=300)
        await anext(handle.stream())
        instance = await tell_to_drain(raw, "q", "first")
        await first.task
        assert await presence(raw, "q", "first", instance) == "left"
        async with running_worker(redis_cluster_url, name="second"):
            assert (await handle.result()).text == expected_text("x", handle.id, 300)
            await eventually(lambda: _is_live(raw, "second"))


async def test_dead_letters(redis_cluster_url: str, redis: RedisClient) -> None:
    async with (
        contextlib.aclosing(connect(redis_cluster_url, decode=False)) as raw,
        AsyncClient(redis_cluster_url, queue="q") as client,
        running_worker(redis_cluster_url),
    ):
        await redis.xadd(keys.requests("q"), {"id": "bad", "prompt": "x", "max_tokens": "many"})
        await eventually(lambda: redis.xlen(keys.malformed("q")))
        (letter,) = [letter async for letter in dead_letters.read_letters(raw, "q", "malformed")]
        assert await dead_letters.owners(raw, "q", "bad")
        new_id = await dead_letters.replay(raw, "q", letter)
        assert new_id is not None
        with pytest.raises(RequestRefused, match="max_tokens"):
            await client.handle(new_id).result()
        assert await dead_letters.server_ms(raw, "q") >= letter.given_up_ms
        await eventually(lambda: redis.xlen(keys.malformed("q")))
        ids = [letter.id async for letter in dead_letters.read_letters(raw, "q", "malformed")]
        assert await dead_letters.remove(raw, "q", "malformed", ids) == 1
        assert await redis.get(keys.letter_bytes(keys.malformed("q"))) == "0"


async def test_slots_that_move_while_requests_run(
    redis_cluster_url: str, redis_cluster: list[EmbeddedServer], redis: RedisClient
) -> None:
    """First the queue's slot moves to another node, then that of a running reply."""
    engine = FakeEngine(step_s=0.005)
    async with running_worker(redis_cluster_url, engine), AsyncClient(redis_cluster_url, queue="q") as client:
        running = await client.submit("x", max_tokens=300)
        await anext(running.stream())
        for slot in (slot_of("q"), slot_of(running.id)):
            await asyncio.to_thread(move_slot, redis_cluster, slot)
        late = [await client.generate("late", max_tokens=5) for _ in range(3)]
        reply = await running.result()
        await eventually(lambda: is_queue_empty(redis))
    assert reply.text == expected_text("x", running.id, 300)
    assert [each.text for each in late] == [expected_text("late", each.request_id, 5) for each in late]
    assert engine.prefilled.count(running.id) == 1


def move_slot(servers: list[EmbeddedServer], slot: int) -> None:
    """Moves a slot with its keys to another node, as `redis-cli --cluster reshard` does."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(BlockingRedis.from_url(server.url, protocol=2)) for server in servers]
        ids = [node.execute_command("CLUSTER MYID") for node in nodes]
        (source,) = [at for at, node in enumerate(nodes) if owns(node, slot)]
        target = (source + 1) % len(nodes)
        nodes[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        while found := nodes[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            nodes[source].execute_command(
                "MIGRATE", "127.0.0.1", servers[target].port, "", 0, 5000, "KEYS", *found
            )  # fmt: skip
        for at in (target, source, *(other for other in range(len(nodes)) if other not in (source, target))):
            nodes[at].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])


def owns(node: BlockingRedis, slot: int) -> bool:
    """Checks whether the node answers for the slot itself."""
    probe = next(f"{{{number}}}" for number in range(10**6) if slot_of(str(number)) == slot)
    try:
        node.exists(probe)
    except exceptions.MovedError:
        return False
    return True
