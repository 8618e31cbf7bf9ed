"""Entries are taken by size: no body over the limit reaches a worker, except one from a blocking read."""

from __future__ import annotations

import asyncio

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.config import WorkerConfig
from penstock.worker.run import entries
from penstock.worker.run.entries import LARGEST_ID, EntryReader, QueueEntry
from tests.support.patience import eventually
from tests.support.redis_servers.streams import add_entry, read_owners, read_raw_stream

pytestmark = pytest.mark.every_server

STREAM = keys.requests("q")
LIMIT = 100
LARGE = {"id": "large", "prompt": "x" * LIMIT}


@pytest.fixture
async def reader(raw: RedisClient) -> EntryReader:
    reader = EntryReader(raw, raw, WorkerConfig(queue="q", name="w", max_body_bytes=LIMIT, block_ms=10))
    await reader.make_group()
    return reader


async def add(redis: RedisClient, *bodies: dict[str, str]) -> list[str]:
    return [await add_entry(redis, STREAM, body) for body in bodies]


async def pending(redis: RedisClient, worker: str = "w") -> list[str]:
    return list(await read_owners(redis, STREAM, worker))


async def give_up(redis: RedisClient) -> None:
    """Gives all entries to nobody, as an older worker leaves them."""
    ids = [entry_id for entry_id, _ in await read_raw_stream(redis, STREAM)]
    await redis.xreadgroup(keys.GROUP, keys.UNOWNED, {STREAM: ">"})
    await redis.xclaim(STREAM, keys.GROUP, keys.UNOWNED, 0, [*ids])


async def test_new_entries_are_taken_up_to_a_number(raw: RedisClient, reader: EntryReader) -> None:
    assert await reader.take(5) == []
    ids = await add(raw, *({"prompt": str(number)} for number in range(5)))
    taken = await reader.take(3)
    assert [entry.id for entry in taken] == ids[:3] == await pending(raw)
    assert taken[0] == QueueEntry(ids[0], {b"prompt": b"0"}, 7)
    assert [entry.id for entry in await reader.take(3)] == ids[3:]


@pytest.mark.parametrize("way", ["take", "unowned", "pending"])
async def test_a_body_over_the_limit_stays_where_it_is(raw: RedisClient, reader: EntryReader, way: str) -> None:
    """The worker learns its size and its id, so that it can refuse it under that id."""
    (large,) = await add(raw, LARGE)
    match way:
        case "take":
            found = await reader.take(2)
        case "unowned":
            await give_up(raw)
            await reader.sweep()
            found = await reader.take(2)
        case _:
            await raw.xreadgroup(keys.GROUP, "w", {STREAM: ">"})
            found = await reader.pending("0-0")
    (entry,) = found
    assert entry == QueueEntry(large, {b"id": b"large"}, LIMIT + 13, is_whole=False, was_here=way == "pending")
    assert entry.kept == {}
    assert await pending(raw) == [large]


@pytest.mark.parametrize("way", ["take", "unowned", "pending"])
async def test_one_answer_brings_a_bounded_number_of_bytes(
    raw: RedisClient, reader: EntryReader, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body over the limit counts with its size: the server has to read it to learn that."""
    monkeypatch.setattr(entries, "BYTES_PER_READ", 100)
    bodies = [{"prompt": "x" * 44}] * 5 + [LARGE] + [{"prompt": "x"}] * 3
    ids = await add(raw, *bodies)
    if way == "pending":
        await raw.xreadgroup(keys.GROUP, "w", {STREAM: ">"})
    elif way == "unowned":
        await give_up(raw)
        await reader.sweep()
    found: list[list[str]] = []
    last = "0-0"
    for _ in range(5):
        page = await (reader.pending(last) if way == "pending" else reader.take(100))
        found.append([entry.id for entry in page])
        last = found[-1][-1] if page else last
    assert found == [ids[0:2], ids[2:4], ids[4:6], ids[6:9], []]


async def test_an_entry_that_was_deleted_while_pending_is_told_as_such(raw: RedisClient, reader: EntryReader) -> None:
    ids = await add(raw, {"prompt": "a"}, {"": ""})
    await reader.take(2)
    await raw.xdel(STREAM, ids[0])
    deleted, empty = await reader.pending("0-0")
    assert (deleted.id, deleted.is_deleted) == (ids[0], True)
    assert (empty.id, empty.is_deleted, empty.fields) == (ids[1], False, {b"": b""})


async def add_while_it_waits(raw: RedisClient, *bodies: dict[str, str]) -> tuple[list[str], list[QueueEntry]]:
    """Adds entries at once while a take waits for one; returns their ids, and what the take got."""
    patient = EntryReader(raw, raw, WorkerConfig(queue="q", name="w", max_body_bytes=LIMIT, block_ms=10_000))
    await patient.make_group()
    waiting = asyncio.create_task(patient.take(100))
    await eventually(lambda: _is_waiting(raw))
    async with raw.pipeline(transaction=True) as together:
        for body in bodies:
            together.xadd(STREAM, body)  # type: ignore[arg-type]
        ids = [entry_id.decode() for entry_id in await together.execute()]
    return ids, await waiting


async def _is_waiting(raw: RedisClient) -> bool:
    return bool((await raw.info("clients"))["blocked_clients"])


async def test_a_wait_brings_one_entry_and_leaves_the_others(raw: RedisClient) -> None:
    ids, taken = await add_while_it_waits(raw, {"prompt": "a"}, {"prompt": "b"})
    assert [entry.id for entry in taken] == ids[:1] == await pending(raw)


async def test_a_body_over_the_limit_that_a_wait_brings_is_not_kept(raw: RedisClient) -> None:
    """No script can wait, so the body reaches the worker, but goes no further."""
    (large,), (entry,) = await add_while_it_waits(raw, LARGE)
    assert entry == QueueEntry(large, {b"id": b"large"}, LIMIT + 13, is_whole=False)


async def test_entries_of_nobody_come_before_new_ones_of_their_tenant(raw: RedisClient, reader: EntryReader) -> None:
    (old,) = await add(raw, {"prompt": "old"})
    await give_up(raw)
    (new,) = await add(raw, {"prompt": "new", "timeout_s": "1"})
    await reader.sweep()
    assert [entry.id for entry in await reader.take(5)] == [old, new]


async def test_the_largest_id_is_an_entry_like_any_other(raw: RedisClient, reader: EntryReader) -> None:
    await raw.xadd(STREAM, {"prompt": "a"}, id=LARGEST_ID)
    assert [entry.id for entry in await reader.take(1)] == [LARGEST_ID]
    assert [entry.id for entry in await reader.pending("0-0")] == [LARGEST_ID]
    assert await reader.pending(LARGEST_ID) == []


async def test_the_group_knows_a_worker_from_its_first_look_on(raw: RedisClient, reader: EntryReader) -> None:
    """`penstock workers` lists it then, although it has been given nothing."""
    await reader.pending("0-0")
    assert [consumer["name"] for consumer in await raw.xinfo_consumers(STREAM, keys.GROUP)] == [b"w"]
