"""Requests are enqueued once, within a bound, into a group that sees everything."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, QueueFull, RequestRefused
from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Added, Full, Late, enqueue
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.pipeline import Batcher
from penstock.protocol.wire import MAX_FIELDS, ChunkEntry, EndEntry, GenerateRequest, OwnEntry
from tests.support.programs.fakes import LossyProxy
from tests.support.redis_servers.streams import read_stream

pytestmark = pytest.mark.every_server

STREAM = keys.requests("q")


async def put(
    redis: RedisClient | Batcher, request_id: str, *, limit: int | None = None, window_s: int = 60
) -> Added | Full | Late:
    fields = {"request": json.dumps({"prompt": request_id})}
    execute = redis.execute if isinstance(redis, Batcher) else redis.execute_command
    return await enqueue(execute, "q", request_id, fields, max_length=limit, dedupe_window_s=window_s)


async def test_a_request_is_added_once(redis: RedisClient) -> None:
    first = await put(redis, "a")
    assert isinstance(first, Added)
    assert not first.again
    assert await put(redis, "a") == Added(first.entry_id, again=True)
    assert await read_stream(redis, STREAM) == [(first.entry_id, {"request": '{"prompt": "a"}'})]


async def test_no_script_is_given_more_fields_than_it_can_unpack(redis: RedisClient) -> None:
    wide = {f"f{i}": "x" for i in range(MAX_FIELDS)}
    options = {"max_length": None, "dedupe_window_s": 60}
    assert isinstance(await enqueue(redis.execute_command, "q", "a", wide, **options), Added)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 129 fields"):
        await enqueue(redis.execute_command, "q", "b", wide | {"more": "x"}, **options)  # type: ignore[arg-type]
    assert await redis.xlen(STREAM) == 1
    for schema in (GenerateRequest, OwnEntry, ChunkEntry, EndEntry):
        assert len(schema.model_fields) <= MAX_FIELDS // 2


async def test_the_mark_expires_with_the_window(redis: RedisClient) -> None:
    await put(redis, "a", window_s=77)
    assert 70 < await redis.ttl(keys.seen("q", "a")) <= 77


async def test_a_full_queue_refuses_with_its_length_but_knows_what_it_has(redis: RedisClient) -> None:
    first = await put(redis, "a", limit=2)
    await put(redis, "b", limit=2)
    assert await put(redis, "c", limit=2) == Full(2)
    assert await put(redis, "a", limit=2) == Added(first.entry_id, again=True)  # type: ignore[union-attr]
    assert not await redis.exists(keys.seen("q", "c"))
    assert isinstance(await put(redis, "c", limit=3), Added)


async def test_a_new_queue_has_its_group_from_the_start(redis: RedisClient) -> None:
    await put(redis, "a")
    (group,) = await redis.xinfo_groups(STREAM)
    assert (group["name"], group["lag"]) == (keys.GROUP, 1)


async def test_concurrent_sends_of_one_id_add_one_entry(redis: RedisClient) -> None:
    added = await asyncio.gather(*(put(redis, "a") for _ in range(20)))
    assert len({item.entry_id for item in added if isinstance(item, Added)}) == 1
    assert sum(isinstance(item, Added) and not item.again for item in added) == 1


@pytest.mark.parametrize("known", [True, False], ids=["EVALSHA", "EVAL"])
async def test_a_lost_answer_adds_no_second_entry(
    redis_server: EmbeddedServer, redis: RedisClient, known: bool
) -> None:
    """The command ran, its answer never came, and the batcher sent it again."""
    if known:
        await put(redis, "warm-up")
    else:
        await redis.script_flush()
    before = await redis.xlen(STREAM)
    async with LossyProxy(redis_server.port) as proxy, aclosing(connect(proxy.url, decode=False)) as client:
        proxy.lose_next_answer_to(b"EVALSHA" if known else b"EVAL\r\n")
        added = await put(Batcher(client, retries=1), "a")
    assert proxy.num_lost == 1
    assert isinstance(added, Added)
    assert added.again
    assert await redis.xlen(STREAM) == before + 1


async def test_a_client_needs_one_round_trip_a_request_once_the_server_knows_the_script(
    redis: RedisClient, redis_url: str
) -> None:
    await redis.script_flush()
    async with AsyncClient(redis_url, queue="q") as client:
        for prompt in "abc":
            await client.submit(prompt)
    stats = await redis.info("commandstats")
    assert [stats[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "eval", "xadd")] == [3, 1, 3]
    assert stats["cmdstat_evalsha"]["failed_calls"] + stats["cmdstat_evalsha"]["rejected_calls"] == 1


async def test_the_client_submits_once_over_a_lossy_network(redis_server: EmbeddedServer, redis: RedisClient) -> None:
    async with LossyProxy(redis_server.port) as proxy, AsyncClient(proxy.url, queue="q") as client:
        await client.submit("warm-up")
        proxy.lose_next_answer_to(b"EVALSHA")
        handle = await client.submit("once")
    assert proxy.num_lost == 1
    entries = await read_stream(redis, STREAM)
    assert [json.loads(fields["request"])["prompt"] for _, fields in entries] == ["warm-up", "once"]
    assert json.loads(entries[-1][1]["request"])["id"] == handle.id


async def test_the_client_raises_queue_full(redis: RedisClient, redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q", max_queue_length=2) as client:
        await client.submit("a")
        await client.submit("b")
        with pytest.raises(QueueFull, match="holds 2 requests, the limit is 2") as caught:
            await client.submit("c")
        assert (caught.value.length, caught.value.limit) == (2, 2)
        with pytest.raises(QueueFull):
            await client.generate("d")
    assert await redis.xlen(STREAM) == 2
    assert not await redis.keys("*:cancel")


async def test_a_client_without_a_limit_adds_to_any_queue(redis: RedisClient, redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q", max_queue_length=None) as client:
        for _ in range(3):
            await client.submit("a")
    assert await redis.xlen(STREAM) == 3


async def test_what_is_wrong_with_a_request_is_told_before_anything_is_sent(redis: RedisClient, redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"temprature": 1.0}, "temprature"),
            ({"top_p": 1.5}, "top_p"),
            ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
            ({"id": "no spaces"}, "id"),
        ]
        for sampling, named in wrong:
            with pytest.raises(RequestRefused, match=named) as caught:
                await client.submit("a", **sampling)
            assert caught.value.code == "invalid_request"
        for prompt in ([], [{"role": "nobody", "content": "x"}], "\ud800"):
            with pytest.raises(RequestRefused):
                await client.submit(prompt)
    assert not await redis.exists(STREAM)


@pytest.mark.parametrize(
    "settings", [{"queue": "no spaces"}, {"queue": ""}, {"max_queue_length": 0}, {"dedupe_window_s": 0}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    (value,) = settings.values()
    with pytest.raises(ValueError, match=repr(value)):
        AsyncClient("redis://localhost", **settings)  # type: ignore[arg-type]
