"""Each sweep looks at a bounded number of entries and loses no wish to cancel. What means nothing any more is
forgotten.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.queue.cancelling import CANCEL_TTL_S, cancel
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import Bill
from penstock.protocol.scripts.lanes import NEW_PER_SCRIPT, WISHES_PER_SCRIPT
from tests.protocol.scripts.script_calls import STREAM, put_back, run
from tests.support.redis_servers.streams import add_entry

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
ACTS = 4  # as in lanes/notes.lua


async def add(redis: RedisClient, entry_id: str = "*", **fields: object) -> str:
    body: dict[Any, Any] = {"prompt": "x" * 40, **{name: str(value) for name, value in fields.items()}}
    return await add_entry(redis, STREAM, body, entry_id=entry_id)


async def take(redis: RedisClient, count: int = 1, *, worker: str = "w", **how: Any) -> list[str]:
    entries, *_ = await run(redis, scripts.take("q", worker=worker, count=count, **how, **LIMITS))
    return [entry[0].decode() for entry in entries]


async def sweep(redis: RedisClient, count: int = 64, **limits: Any) -> tuple[list[str], bool, bool]:
    """Sweeps once; returns entries, whether there are more new ones, and whether there is more to look at."""
    command = scripts.sweep("q", worker="sweeper", count=count, **{**LIMITS, **limits})
    entries, has_new, has_more = await run(redis, command)
    return [entry[0].decode() for entry in entries], bool(has_new), bool(has_more)


async def wish(redis: RedisClient, *request_ids: str) -> None:
    await redis.sadd(keys.cancelled("q"), *request_ids)


async def measure(redis: RedisClient) -> None:
    await redis.delete(keys.load("q"))
    await run(redis, scripts.measure("q", every_ms=1000, target_s=10, max_bytes=10**6))


async def test_one_sweep_looks_at_some_wishes_and_the_next_ones_at_the_rest(raw: RedisClient) -> None:
    ids = [await add(raw, id=f"r{number}") for number in range(3)]
    unknown = [f"unknown{number}" for number in range(2 * WISHES_PER_SCRIPT)]
    await wish(raw, *unknown, "r0", "r2")
    found, looks = [], 0
    while await raw.exists(keys.cancelled("q")):
        before = await raw.scard(keys.cancelled("q"))
        entries, _, has_more = await sweep(raw)
        assert before - await raw.scard(keys.cancelled("q")) <= WISHES_PER_SCRIPT
        found += entries
        looks += 1
        assert has_more == (looks < 3)
    assert sorted(found) == [ids[0], ids[2]]
    assert looks == 3


async def test_one_sweep_looks_at_so_many_bytes_of_wishes(raw: RedisClient) -> None:
    """Wishes that are not ids are not kept."""
    await wish(raw, *(f"{number:04d}" + "x" * 400 for number in range(6)))
    for left in (3, 0):
        assert (await sweep(raw, max_bytes=1000))[2]
        assert await raw.scard(keys.cancelled("q")) == left
    assert await sweep(raw, max_bytes=1000) == ([], False, False)
    assert not await raw.exists(keys.asked("q"))


async def test_one_sweep_ends_so_many_and_says_that_there_are_more(raw: RedisClient) -> None:
    late = [await add(raw, f"1700000000000-{number}", timeout_s=60) for number in range(5)]
    cancelled = [await add(raw) for _ in range(5)]
    await wish(raw, *cancelled)
    found, more = [], []
    for _ in range(3):
        entries, _, has_more = await sweep(raw, count=4)
        found += entries
        more.append((len(entries), has_more))
    assert more == [(4, True), (4, True), (2, False)]
    assert sorted(found) == sorted([*late, *cancelled])


async def test_a_wish_is_kept_for_what_has_no_place_yet(raw: RedisClient) -> None:
    for _ in range(NEW_PER_SCRIPT + 4):  # they are read a few at a time
        await add(raw)
    named, other = await add(raw, id="named"), await add(raw)
    await wish(raw, "named", other)
    assert await sweep(raw) == ([], True, False)
    assert not await raw.exists(keys.cancelled("q"))
    assert sorted((await sweep(raw))[0]) == sorted([named, other])


async def test_a_wish_is_kept_for_what_is_not_there_yet(raw: RedisClient) -> None:
    """A client may cancel what another connection of its own is about to add."""
    await wish(raw, "named")
    assert await sweep(raw) == ([], False, False)
    entry = await add(raw, id="named")
    assert (await sweep(raw))[0] == [entry]


async def test_a_wish_without_a_flag_acts_a_few_times(raw: RedisClient) -> None:
    """The worker that sweeps the entry finds that it goes on, and puts it back."""
    entry = await add(raw, id="named", tenant="a", timeout_s=60)
    await wish(raw, "named")
    for _ in range(1 + ACTS):
        assert (await sweep(raw))[0] == [entry]
        assert await put_back(raw, "sweeper", [entry], has_had=False) == 1
    assert (await sweep(raw))[0] == []
    assert not await raw.exists(keys.asked("q"))
    assert await raw.zscore(keys.due("q"), entry) == int(entry.split("-")[0]) + 60_000
    assert await take(raw) == [entry]


async def test_wishes_are_kept_for_a_while(raw: RedisClient) -> None:
    await raw.zadd(keys.asked("q"), {"old": 1_700_000_000_000})
    await wish(raw, "new")
    await sweep(raw)
    assert await raw.zrange(keys.asked("q"), 0, -1) == [b"new"]
    assert 0 < await raw.ttl(keys.asked("q")) <= 86_400
    old = await add(raw, id="old")
    assert (await sweep(raw))[0] == []
    assert await take(raw) == [old]


async def test_a_cancel_expires_where_no_worker_looks(raw: RedisClient) -> None:
    await cancel(raw, "q", "x")
    for key in (keys.cancelled("q"), keys.cancel("q", "x")):
        assert 0 < await raw.ttl(key) <= CANCEL_TTL_S


async def test_an_entry_is_found_by_its_id_after_the_mark_of_its_enqueue_is_gone(raw: RedisClient) -> None:
    """`dedupe_window_s` may be shorter than the wait. Where an older worker placed the entry, there is only
    the mark.
    """
    entry = await add(raw, id="x")
    await take(raw, 0)
    assert await raw.hgetall(keys.named("q")) == {b"x": entry.encode()}
    marked = await add(raw, id="y")
    await take(raw, 0)
    await raw.hdel(keys.named("q"), "y")
    await raw.set(keys.seen("q", "y"), marked)
    await wish(raw, "x", "y")
    assert sorted((await sweep(raw))[0]) == sorted([entry, marked])


async def test_names_of_what_waits_no_more_are_forgotten(raw: RedisClient) -> None:
    entry, deleted, taken, aside = [await add(raw, id=f"r{number}") for number in range(4)]
    await take(raw, 0)
    await raw.xdel(STREAM, deleted)
    await raw.xack(STREAM, keys.GROUP, deleted)
    await raw.xclaim(STREAM, keys.GROUP, "old", 0, [taken])
    await raw.xclaim(STREAM, keys.GROUP, set_aside_for("A"), 0, [aside])
    await measure(raw)
    assert await raw.hgetall(keys.named("q")) == {b"r0": entry.encode(), b"r3": aside.encode()}
    assert await take(raw, kinds=("A", ""), count=5) == [entry, aside]
    assert not await raw.exists(keys.named("q"))


async def charge(redis: RedisClient, tenant: str, tokens: int) -> None:
    """Charges a tenant for a request that a worker read past the lanes."""
    entry = await add(redis, tenant=tenant)
    await redis.xreadgroup(keys.GROUP, "idle", {STREAM: ">"})
    await run(redis, scripts.ack("q", worker="idle", bills=[Bill(entry, tenant, tokens)]))


async def test_tenants_of_a_queue_where_nobody_waits_are_forgotten(raw: RedisClient) -> None:
    """Those served least are forgotten; they come back as if they had been served no less than before."""
    for number in range(150):
        await charge(raw, f"t{number:03d}", 1000 + number)
    await measure(raw)
    known: Any = await raw.zrange(keys.service("q"), 0, -1)
    assert known == [f"t{number:03d}".encode() for number in range(50, 150)]
    await add(raw, tenant="t000")
    await add(raw, tenant="t149")
    await take(raw, 0)
    assert await raw.zrange(keys.band("q", 0), 0, -1, withscores=True) == [(b"t000", 1049), (b"t149", 1149)]


async def test_tenants_are_known_while_somebody_waits(raw: RedisClient) -> None:
    for number in range(150):
        await charge(raw, f"t{number:03d}", 10_000 + number)
    await add(raw)
    await take(raw, 0)
    await measure(raw)
    assert await raw.zcard(keys.service("q")) == 150
