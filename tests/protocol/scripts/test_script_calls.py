"""The scripts on the stream of calls: each call is answered once, by its owner, and never after its time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts.calls import MAX_DROPPED
from penstock.protocol.wire import Envelope
from tests.protocol.scripts.script_calls import run
from tests.support.redis_servers.streams import add_entry, read_owners, read_raw_stream

pytestmark = pytest.mark.every_server

CALLS, ANSWERS = keys.calls("q"), keys.answers("q", "m")
LONG_AGO_MS = 1_700_000_000_000


@pytest.fixture(autouse=True)
async def group(raw: RedisClient) -> None:
    await raw.xgroup_create(CALLS, keys.GROUP, id="0", mkstream=True)


async def add(raw: RedisClient, entry_id: str = "*", **fields: str) -> str:
    return await add_entry(raw, CALLS, {"call": "tokenize", "prompt": "x", **fields}, entry_id=entry_id)


async def take(
    raw: RedisClient,
    worker: str,
    *,
    count: int = 10,
    idle_ms: int = 5000,
    in_hand: tuple[str, ...] = (),
    max_body_bytes: int = 1000,
    max_bytes: int = 10**6,
) -> list[tuple[str, int]]:
    """Returns (entry, number of times it was taken) of what the worker got."""
    command = scripts.take_calls(
        "q",
        worker=worker,
        count=count,
        max_body_bytes=max_body_bytes,
        max_bytes=max_bytes,
        idle_ms=idle_ms,
        in_hand=in_hand,
    )
    return [(entry.decode(), times) for entry, _, _, _, times in await run(raw, command)]


async def answer(raw: RedisClient, worker: str, entry_id: str, timeout_ms: int = 10_000) -> Any:
    envelope = Envelope("c", "m", timeout_ms)
    command = scripts.answer_call(
        "q", envelope, worker=worker, entry_id=entry_id, ttl_ms=60_000, fields={"id": "c", "text": "x"}
    )
    return await run(raw, command)


async def leave_alone(raw: RedisClient, worker: str, entry_id: str) -> None:
    """Has the entry look as if nothing had been heard of its worker for a while."""
    await raw.xclaim(CALLS, keys.GROUP, worker, 0, [entry_id], idle=60_000, justid=True)


async def pending(raw: RedisClient) -> list[tuple[str, str]]:
    return [(owner, entry_id) for entry_id, owner in (await read_owners(raw, CALLS)).items()]


async def test_each_call_is_taken_by_one(raw: RedisClient) -> None:
    first, second, third = [await add(raw) for _ in range(3)]
    assert await take(raw, "a", count=2) == [(first, 1), (second, 1)]
    assert await take(raw, "b") == [(third, 1)]
    assert await take(raw, "b") == []


async def test_none_is_taken_where_there_is_no_capacity(raw: RedisClient) -> None:
    await add(raw)
    assert await take(raw, "a", count=0) == []
    assert await pending(raw) == []


async def test_an_answer_removes_the_call_and_expires(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw, "a")
    assert await answer(raw, "a", entry_id) == 1
    assert await answer(raw, "a", entry_id) == 0  # as when the answer to the command was lost
    assert [fields for _, fields in await read_raw_stream(raw, ANSWERS)] == [{b"id": b"c", b"text": b"x"}]
    assert await raw.xlen(CALLS) == 0
    assert await pending(raw) == []
    assert 0 < await raw.pttl(ANSWERS) <= 60_000


async def test_a_call_that_was_left_alone_is_taken_over_and_answered_once(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw, "frozen")
    assert await take(raw, "heir") == []
    await leave_alone(raw, "frozen", entry_id)
    assert await take(raw, "heir") == [(entry_id, 2)]
    assert await answer(raw, "frozen", entry_id) == 0  # it woke up
    assert await answer(raw, "heir", entry_id) == 1
    assert await raw.xlen(ANSWERS) == 1


async def test_a_call_in_hand_stays_with_its_worker(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw, "a")
    await leave_alone(raw, "a", entry_id)
    await take(raw, "a", count=0, in_hand=(entry_id,))
    assert await take(raw, "b") == []
    await leave_alone(raw, "a", entry_id)
    assert await take(raw, "b") == [(entry_id, 2)]
    await take(raw, "a", count=0, in_hand=(entry_id,))  # too late: it is another's
    assert await pending(raw) == [("b", entry_id)]


@pytest.mark.parametrize("fields", [{}, {"timeout_ms": "1"}, {"timeout_ms": str(10**8)}, {"timeout_ms": "nan"}])
async def test_a_call_whose_time_is_over_is_dropped(raw: RedisClient, fields: dict[str, str]) -> None:
    await add(raw, f"{LONG_AGO_MS}-0", **fields)
    late = await add(raw)
    assert await take(raw, "a") == [(late, 1)]
    assert await raw.xlen(CALLS) == 1
    assert await pending(raw) == [("a", late)]


@pytest.mark.parametrize(
    ("timeout_ms", "is_taken"), [("1000", False), ("60000", True), ("60001", False), ("0", False), ("9" * 10, False)]
)
async def test_a_call_waits_for_as_long_as_it_says(raw: RedisClient, timeout_ms: str, is_taken: bool) -> None:
    """A timeout above the maximum, or that is not a number, counts as none."""
    seconds, _ = await raw.time()
    await add(raw, f"{1000 * seconds - 30_000}-0", timeout_ms=timeout_ms)
    assert bool(await take(raw, "a")) == is_taken
    assert await raw.xlen(CALLS) == is_taken


async def test_of_what_is_taken_over_too_so_many_bytes(raw: RedisClient) -> None:
    for _ in range(3):
        await add(raw)
    await raw.xreadgroup(keys.GROUP, "dead", {CALLS: ">"}, count=2)
    for entry_id in await read_owners(raw, CALLS):
        await leave_alone(raw, "dead", entry_id)
    assert [len(await take(raw, "a", count=9, max_bytes=1)) for _ in range(4)] == [1, 1, 1, 0]


async def test_of_many_calls_whose_time_is_over_one_run_drops_so_many(raw: RedisClient) -> None:
    for number in range(MAX_DROPPED + 1):
        await add(raw, f"{LONG_AGO_MS}-{number}")
    late = await add(raw)
    assert await take(raw, "a") == []
    assert await raw.xlen(CALLS) == 2
    assert await pending(raw) == []
    assert await take(raw, "a") == [(late, 1)]


async def test_a_call_that_was_left_alone_until_its_time_was_over_is_dropped(raw: RedisClient) -> None:
    entry_id = await add(raw, f"{LONG_AGO_MS}-0")
    await raw.xreadgroup(keys.GROUP, "dead", {CALLS: ">"})
    await leave_alone(raw, "dead", entry_id)
    assert await take(raw, "a") == []
    assert await raw.xlen(CALLS) == 0
    assert await pending(raw) == []


async def test_nothing_is_answered_late(raw: RedisClient) -> None:
    entry_id = await add(raw, f"{LONG_AGO_MS}-0")
    await raw.xreadgroup(keys.GROUP, "slow", {CALLS: ">"})
    assert await answer(raw, "slow", entry_id) == 0
    assert not await raw.exists(ANSWERS)
    assert await raw.xlen(CALLS) == 0


async def test_a_call_that_was_trimmed_leaves_nothing_behind(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw, "dead")
    await leave_alone(raw, "dead", entry_id)
    await raw.xtrim(CALLS, maxlen=0, approximate=False)
    assert await take(raw, "a") == []
    assert await pending(raw) == []


async def test_of_a_large_call_only_where_the_answer_goes_is_read(raw: RedisClient) -> None:
    await add(raw, id="c", to="m", prompt="x" * 2000)
    await add(raw, to="m", prompt="x" * 2000)
    command = scripts.take_calls("q", worker="a", count=5, max_body_bytes=1000, max_bytes=10**6, idle_ms=1, in_hand=())
    answers = await run(raw, command)
    assert [(is_whole, fields) for _, _, is_whole, fields, _ in answers] == [
        (0, [b"id", b"c", b"to", b"m"]), (0, [b"to", b"m"]),
    ]  # fmt: skip


async def test_junk_in_the_place_of_the_answers_harms_nobody(raw: RedisClient) -> None:
    await raw.set(ANSWERS, "junk")
    entry_id = await add(raw)
    await take(raw, "a")
    assert await answer(raw, "a", entry_id) == 0
    assert await raw.xlen(CALLS) == 0


async def test_old_answers_go_as_new_ones_come(raw: RedisClient) -> None:
    await raw.xadd(ANSWERS, {"id": "old"}, id=f"{LONG_AGO_MS}-0")
    entry_id = await add(raw)
    await take(raw, "a")
    await answer(raw, "a", entry_id)
    assert [fields[b"id"] for _, fields in await read_raw_stream(raw, ANSWERS)] == [b"c"]


async def test_the_consumer_of_calls_leaves_with_its_worker(raw: RedisClient) -> None:
    await add(raw)
    await take(raw, "a", count=1)
    await raw.xgroup_createconsumer(CALLS, keys.GROUP, "b")
    for worker in ("a", "b"):
        await raw.set(keys.heartbeat("q", worker), "i")
        await run(raw, scripts.leave("q", worker=worker, instance="i", card={}))
    assert [consumer["name"] for consumer in await raw.xinfo_consumers(CALLS, keys.GROUP)] == [b"a"]  # it has a call
