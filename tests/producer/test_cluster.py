"""The same client on a three-node cluster: every script and read keeps to one slot."""

from __future__ import annotations

import asyncio

import pytest
from redis.crc import key_slot

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, QueueFull, ReplyGone, ReplyTimeout
from penstock.protocol import keys
from penstock.protocol.ids import new_id, random_slot, slot_of
from penstock.protocol.redis.connection import connect
from tests.support.patience import eventually
from tests.support.programs.fakes import (
    ScriptedReply,
    ScriptedWorker,
    echo,
    name_queue_until_cancelled,
    until_cancelled,
)

pytestmark = pytest.mark.every_server


async def test_the_client_works_on_a_cluster(redis_cluster_url: str) -> None:
    async with ScriptedWorker(redis_cluster_url) as worker, AsyncClient(redis_cluster_url) as client:
        replies = await asyncio.gather(*(client.generate(f"p {number}") for number in range(50)))
        assert [reply.text for reply in replies] == [f"p {number}" for number in range(50)]
        handle = await client.submit("a b c")
        chunks = [chunk async for chunk in handle.stream()]
        assert [chunk.text async for chunk in handle.stream(after=chunks[0].entry_id)] == [" b", " c"]
        assert await handle.state() in ("running", "finished")
        again = await client.generate("x y", id=chunks[0].text)
        assert again.text == "x y"
    assert len({slot_of(request.id or "") for request in worker.taken if request.prompt != "x y"}) == 1


async def test_one_connection_reads_a_client_s_replies(
    redis_cluster_url: str, redis_cluster: list[EmbeddedServer]
) -> None:
    async def never(reply: ScriptedReply) -> None:
        """Leaves the request alone."""

    async with ScriptedWorker(redis_cluster_url, never) as worker, AsyncClient(redis_cluster_url) as client:
        tasks = [asyncio.create_task(client.generate(str(number))) for number in range(40)]
        await eventually(lambda: len(worker.taken) == 40)
        assert await _num_blocked_reads(redis_cluster) == 1
        for task in tasks:
            task.cancel()


async def test_foreign_ids_of_any_slot_are_read_too(redis_cluster_url: str) -> None:
    async with ScriptedWorker(redis_cluster_url), AsyncClient(redis_cluster_url) as client:
        ids = [f"order-{number}" for number in range(12)]
        replies = await asyncio.gather(*(client.generate(request_id, id=request_id) for request_id in ids))
    assert [reply.text for reply in replies] == ids


async def test_cancel_limits_and_expiry_on_a_cluster(redis_cluster_url: str) -> None:
    async with AsyncClient(redis_cluster_url, max_queue_length=1) as client:
        handle = await client.submit("x")
        with pytest.raises(QueueFull):
            await client.submit("y")
        with pytest.raises(ReplyTimeout):
            await handle.result(timeout=0.05)
        async with ScriptedWorker(redis_cluster_url, until_cancelled) as worker:
            await handle.cancel()
            assert (await handle.result()).finish_reason == "cancelled"
            await eventually(lambda: worker.redis.hget(keys.state("default", handle.id), "status"))
            await worker.redis.hset(keys.state("default", handle.id), "status", "done")
            await worker.redis.delete(keys.reply("default", handle.id))
            with pytest.raises(ReplyGone):
                await handle.result()


async def test_map_on_a_cluster(redis_cluster_url: str) -> None:
    async with ScriptedWorker(redis_cluster_url, echo), AsyncClient(redis_cluster_url) as client:
        prompts = [str(number) for number in range(30)]
        assert [result.text async for result in client.map(prompts, max_in_flight=10)] == prompts


def test_ids_land_in_the_slot_asked_for() -> None:
    for _ in range(200):
        slot = random_slot()
        request_id = new_id(slot)
        assert slot_of(request_id) == slot
        assert key_slot(keys.reply("default", request_id).encode()) == slot
        assert key_slot(keys.state("default", request_id).encode()) == slot
    assert len({new_id(5) for _ in range(200)}) == 200


async def test_one_connection_reads_replies_of_two_queues(
    redis_cluster_url: str, redis_cluster: list[EmbeddedServer]
) -> None:
    """Requests of one id in two queues share a slot, and nothing else."""
    async with (
        ScriptedWorker(redis_cluster_url, name_queue_until_cancelled, queue="a"),
        ScriptedWorker(redis_cluster_url, name_queue_until_cancelled, queue="b"),
        AsyncClient(redis_cluster_url, queue="a") as client,
        AsyncClient(redis_cluster_url, queue="b") as other,
    ):
        mine = await client.submit("x", id="same")
        await other.submit("y", id="same")
        theirs = client.handle("same", queue="b")
        streams = mine.stream(), theirs.stream()
        assert [(await anext(stream)).text for stream in streams] == ["a", "b"]
        await eventually(lambda: _num_blocked_reads(redis_cluster))
        assert await _num_blocked_reads(redis_cluster) <= 1  # none in between, when the read is made anew
        await mine.cancel()
        assert (await streams[0].read_to_end()).finish_reason == "cancelled"
        assert (await mine.state(), await theirs.state()) == ("finished", "running")
        await theirs.cancel()
        assert (await streams[1].read_to_end()).finish_reason == "cancelled"


async def _num_blocked_reads(servers: list[EmbeddedServer]) -> int:
    found = 0
    for server in servers:
        node = connect(server.url, decode=True)
        found += sum((each["name"], each["cmd"]) == ("penstock-reader", "xread") for each in await node.client_list())
        await node.aclose()
    return found
