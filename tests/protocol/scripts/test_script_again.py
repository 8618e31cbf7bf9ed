"""A request that waits again, for whatever reason, keeps its priority, tenant, age, deadline and cancel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.scripts import Bill
from tests.protocol.scripts.script_calls import STREAM, give_up_as_before, owners, put_back, run
from tests.support.redis_servers.streams import add_entry

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
LONG_AGO = 1_700_000_000_000
FOREVER_MS = 4_000_000_000_000


async def add(redis: RedisClient, entry_id: str = "*", **fields: object) -> str:
    body: dict[Any, Any] = {"prompt": "x" * 40, **{name: str(value) for name, value in fields.items()}}
    return await add_entry(redis, STREAM, body, entry_id=entry_id)


async def take(redis: RedisClient, count: int = 1, *, worker: str = "w", **how: Any) -> list[str]:
    entries, *_ = await run(redis, scripts.take("q", worker=worker, count=count, **how, **LIMITS))
    return [entry[0].decode() for entry in entries]


async def sweep(redis: RedisClient, *, worker: str = "sweeper") -> list[str]:
    """Sweeps all that there is to sweep."""
    found: list[str] = []
    while True:
        entries, *more = await run(redis, scripts.sweep("q", worker=worker, count=10, **LIMITS))
        found += [entry[0].decode() for entry in entries]
        if not any(more):
            return found


async def gives_way(redis: RedisClient, entry_id: str) -> None:
    assert await put_back(redis, "had", [entry_id]) == 1


async def is_passed_on(redis: RedisClient, entry_id: str) -> None:
    assert await run(redis, scripts.pass_on("q", worker="had", entry_id=entry_id, lowest=1000, room=1)) == 1


async def loses_its_worker(redis: RedisClient, entry_id: str) -> None:
    assert await run(redis, scripts.retire("q", stream=STREAM, consumer="had", count=10)) == 1


async def loses_its_worker_to_one_of_before(redis: RedisClient, entry_id: str) -> None:
    await give_up_as_before(redis, [entry_id])


async def is_set_aside(redis: RedisClient, entry_id: str) -> None:
    await redis.set(keys.heartbeat("q", set_aside_for("A")), "x")
    assert await run(redis, scripts.set_aside("q", worker="had", entry_id=entry_id, kind="A")) == 1


async def loses_its_model(redis: RedisClient, entry_id: str) -> None:
    await is_set_aside(redis, entry_id)
    await redis.delete(keys.heartbeat("q", set_aside_for("A")))
    assert await run(redis, scripts.retire("q", stream=STREAM, consumer=set_aside_for("A"), count=10)) == 1
    assert not await redis.exists(keys.aside("q", "A"))


async def is_left_alike(redis: RedisClient, entry_id: str, wait_ms: int = 10**6) -> None:
    """It waits for a while for workers that round as its own did."""
    await redis.zadd(keys.alike("q", "A/a"), {"friend": FOREVER_MS})
    command = scripts.set_aside("q", worker="had", entry_id=entry_id, kind="A/a", wait_ms=wait_ms, is_new=True)
    assert await run(redis, command) == 1


async def is_left_for_too_long(redis: RedisClient, entry_id: str) -> None:
    await is_left_alike(redis, entry_id)
    assert await take(redis, worker="other", exact_wait_ms=0, lowest=1000) == []
    assert not await redis.exists(keys.aside("q", "A/a"), keys.orphaned("q"))


WAYS: dict[str, Callable[[RedisClient, str], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        gives_way, is_passed_on, loses_its_worker, loses_its_worker_to_one_of_before, is_set_aside, loses_its_model,
        is_left_alike, is_left_for_too_long,
    )
}  # fmt: skip
ASIDE = ("is_set_aside", "is_left_alike")
BACK_IN_LINE = sorted(WAYS.keys() - {*ASIDE, "is_passed_on"})


async def reads_past_lanes(redis: RedisClient) -> str:
    """Reads as a worker that waits for new entries."""
    answer = await redis.xreadgroup(keys.GROUP, "had", {STREAM: ">"}, count=1)
    [(_, [(entry_id, _)])] = stream_entries(answer)
    return entry_id.decode()


async def takes(redis: RedisClient) -> str:
    (entry_id,) = await take(redis, worker="had")
    return entry_id


READS: dict[str, Callable[[RedisClient], Awaitable[str]]] = {"take": takes, "read": reads_past_lanes}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READS)
async def test_its_deadline_holds(raw: RedisClient, way: str, read: str) -> None:
    await add(raw, f"{LONG_AGO}-1", timeout_s=60, id="x")
    entry_id = await READS[read](raw)
    await WAYS[way](raw, entry_id)
    assert await sweep(raw) == [entry_id]
    assert (await owners(raw))["sweeper"] == 1
    assert not await raw.exists(
        keys.due("q"), keys.bands("q"), keys.named("q"), *(keys.aside("q", kind) for kind in ("A", "A/a"))
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_noted_before", [True, False])
@pytest.mark.parametrize("name", ["its own", "the entry's"])
async def test_its_cancel_holds(raw: RedisClient, way: str, read: str, is_noted_before: bool, name: str) -> None:
    """That includes a cancel that a sweep found while a worker had the entry, whatever the raw entry is called."""
    await add(raw, **({"id": "x"} if name == "its own" else {}))
    entry_id = await READS[read](raw)
    noted = raw.sadd(keys.cancelled("q"), "x" if name == "its own" else entry_id)
    if is_noted_before:
        await noted
        assert await sweep(raw) == []
        assert not await raw.exists(keys.cancelled("q"))
    await WAYS[way](raw, entry_id)
    if not is_noted_before:
        await noted
    assert await sweep(raw) == [entry_id]


@pytest.mark.parametrize("way", BACK_IN_LINE)
@pytest.mark.parametrize("read", READS)
async def test_it_goes_by_its_priority_and_first_within_its_tenant(raw: RedisClient, way: str, read: str) -> None:
    had = await add(raw, tenant="a", priority=2, timeout_s=86_400)
    assert await READS[read](raw) == had
    due_before = await add(raw, tenant="a", priority=2, timeout_s=5)
    higher = await add(raw, tenant="b", priority=3)
    lower = await add(raw, tenant="b", priority=1)
    await WAYS[way](raw, had)
    assert await sweep(raw) == []
    assert await take(raw, 9) == [higher, had, due_before, lower]


@pytest.mark.parametrize("way", WAYS)
async def test_it_is_counted_as_waiting(raw: RedisClient, way: str) -> None:
    """Requests set aside are the exception: they wait for some workers only."""
    had = await add(raw, tenant="a", priority=-3)
    await takes(raw)
    await WAYS[way](raw, had)
    await sweep(raw)
    found = dict(await raw.hgetall(keys.backlog("q")))
    counted = {} if way in ASIDE else {b"-3 entries": b"1", b"-3 bytes": b"63"}
    assert {name: value for name, value in found.items() if value != b"0"} == counted
    assert await take(raw, kinds=("A", "A/a"), exact_wait_ms=10**6) == [had]
    assert not any(int(value) for value in (await raw.hvals(keys.backlog("q"))))


@pytest.mark.parametrize("way", BACK_IN_LINE)
async def test_its_tenant_s_turn_comes_no_sooner_for_it(raw: RedisClient, way: str) -> None:
    had = await add(raw, tenant="a")
    await takes(raw)
    await run(raw, scripts.charge("q", worker="had", bills=[Bill(had, "a", 1000)]))
    other = await add(raw, tenant="b")
    await take(raw, 0)
    await raw.zadd(keys.band("q", 0), {"b": 500})
    await WAYS[way](raw, had)
    await sweep(raw)
    assert await take(raw, 1) == [other]
    assert await take(raw, 1) == [had]
    served = await raw.zscore(keys.service("q"), "a")
    assert served == 1000  # as it was: nothing is charged twice
    assert await run(raw, scripts.ack("q", worker="w", bills=[Bill(had, "a", 1100)])) == 1
    assert await raw.zscore(keys.service("q"), "a") == 1100
    assert not await raw.hexists(keys.charged("q"), had)


@pytest.mark.parametrize("way", BACK_IN_LINE)
async def test_it_has_waited_since_its_enqueue(raw: RedisClient, way: str) -> None:
    """So it is overtaken by a bounded number, and no more."""
    had = await add(raw, f"{LONG_AGO}-1", tenant="a", priority=-1000)
    await takes(raw)
    high = [await add(raw, tenant="b", priority=9) for _ in range(8)]
    await WAYS[way](raw, had)
    await sweep(raw)
    assert await take(raw, 3, max_overtakes=3) == high[:3]
    assert await take(raw, 2, max_overtakes=3) == [had, high[3]]


async def test_those_that_wait_again_keep_their_order(raw: RedisClient) -> None:
    had = [await add(raw, f"{LONG_AGO + number * 400}-{9 - number}", tenant="a") for number in range(6)]
    assert await take(raw, 6, worker="had", max_overtakes=99) == had
    assert await put_back(raw, "had", had[:2]) == 2
    assert await run(raw, scripts.retire("q", stream=STREAM, consumer="had", count=10)) == 4
    new = await add(raw, tenant="a", timeout_s=1)
    assert await take(raw, 9, max_overtakes=99) == [*had, new]


@pytest.mark.parametrize("is_known", [True, False])
async def test_bodies_of_a_dead_worker_are_read_only_where_no_script_knows_them(
    raw: RedisClient, is_known: bool
) -> None:
    """Otherwise they are read up to a bound of bytes in one run."""
    ids = [await add(raw, tenant="a") for _ in range(7)]
    for _ in ids:
        await READS["take" if is_known else "read"](raw)
    bills = [Bill(entry_id, "a", 100) for entry_id in ids[:3]] if is_known else []
    await run(raw, scripts.charge("q", worker="had", bills=bills))
    await raw.config_resetstat()
    command = scripts.retire("q", stream=STREAM, consumer="had", count=100, max_bytes=100)  # 53 each
    freed = [await run(raw, command) for _ in range(5)]
    stats = await raw.info("commandstats")
    assert stats.get("cmdstat_xrange", {"calls": 0})["calls"] == (0 if is_known else 7)
    assert freed == ([7, 0, 0, 0, 0] if is_known else [2, 2, 2, 1, 0])
    assert await take(raw, 9) == ids


async def test_what_is_given_back_is_read_in_pages(raw: RedisClient) -> None:
    ids = [await add(raw, tenant="a") for _ in range(4)]
    for _ in ids:
        await reads_past_lanes(raw)
    assert await run(raw, scripts.put_back("q", worker="had", entry_ids=ids, max_bytes=100)) == [2, 2]
    assert await run(raw, scripts.put_back("q", worker="had", entry_ids=ids[2:], max_bytes=100)) == [2, 2]
    assert await run(raw, scripts.put_back("q", worker="had", entry_ids=[])) == [0, 0]
    assert await take(raw, 9) == ids


@pytest.mark.parametrize("read", READS)
async def test_what_was_deleted_meanwhile_is_gone(raw: RedisClient, read: str) -> None:
    given_back, left = await add(raw), await add(raw)
    for entry_id in (given_back, left):
        assert await READS[read](raw) == entry_id
        await raw.xdel(STREAM, entry_id)
    assert await put_back(raw, "had", [given_back]) == 0
    assert await run(raw, scripts.retire("q", stream=STREAM, consumer="had", count=10)) == 1
    assert await sweep(raw) == await take(raw, 9) == []
    assert (await raw.xpending(STREAM, keys.GROUP))["pending"] == 0
    assert not await raw.exists(keys.bands("q"), keys.charged("q"))


async def test_what_is_set_aside_goes_by_priority_beside_the_rest(raw: RedisClient) -> None:
    """Only workers with its model get it, until there has been none for a while."""
    aside = {priority: await add(raw, priority=priority, tenant="a") for priority in (-1000, 5, 0)}
    for _ in aside:
        await is_set_aside(raw, await takes(raw))
    usual = await add(raw, priority=0, tenant="b")
    high = [await add(raw, priority=9, tenant="b") for _ in range(2)]
    await take(raw, 0)
    assert await take(raw, 1, worker="other", kinds=("B", "")) == high[:1]
    assert await take(raw, 1, worker="a", kinds=("A", "")) == high[1:]
    assert await take(raw, 9, worker="a", kinds=("A", ""), lowest=0) == [aside[5], aside[0], usual]
    assert await take(raw, 9, worker="other", kinds=("B", "")) == []
    assert await take(raw, 9, worker="a", kinds=("A", "")) == [aside[-1000]]
    assert not await raw.exists(keys.aside("q", "A"), keys.bands("q"))
    low = [await add(raw, tenant="a"), await add(raw, tenant="a")]
    for _ in low:
        await is_set_aside(raw, await takes(raw))
    await raw.delete(keys.aside("q", "A"))  # by hand: entries without an index go by age
    assert await take(raw, 9, worker="a", kinds=("A", "")) == low


async def test_nobody_sets_aside_what_another_has(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw, worker="other")
    await raw.set(keys.heartbeat("q", set_aside_for("A")), "x")
    await run(raw, scripts.set_aside("q", worker="had", entry_id=entry_id, kind="A"))
    assert (await owners(raw))["other"] == 1
    assert not await raw.exists(keys.aside("q", "A"))


async def test_nothing_is_set_aside_for_a_model_that_is_gone(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await take(raw)
    assert await run(raw, scripts.set_aside("q", worker="w", entry_id=entry_id, kind="A")) == 0
    assert (await owners(raw))["w"] == 1
    assert not await raw.exists(keys.aside("q", "A"))


async def test_of_what_workers_of_before_left_one_sweep_places_a_part(raw: RedisClient) -> None:
    ids = [await add(raw) for _ in range(25)]
    await raw.xreadgroup(keys.GROUP, keys.UNOWNED, {STREAM: ">"})
    more = []
    for _ in range(3):
        _, _, has_more = await run(raw, scripts.sweep("q", worker="w", count=10, **LIMITS))
        more.append(has_more)
    assert more == [1, 1, 0]
    assert await take(raw, 99) == ids


WAIT: dict[str, Any] = {"kind": "A/a", "wait_ms": 5000}
ALIKE: dict[str, Any] = {"kinds": ("A", "A/a"), "exact_wait_ms": 5000}
OTHERS: dict[str, Any] = {"kinds": ("A", "A/b"), "exact_wait_ms": 5000}


async def clock_ms(redis: RedisClient) -> int:
    seconds, micros = await redis.time()
    return int(seconds * 1000 + micros // 1000)


async def test_what_a_dead_worker_had_is_left_alike_since_its_heartbeat_lapsed(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await takes(raw)
    lapsed_ms = await clock_ms(raw) - 4000
    await raw.zadd(keys.lapses("q"), {"had": lapsed_ms})
    await raw.zadd(keys.alike("q", "A/a"), {"friend": FOREVER_MS})
    await loses_its_worker(raw, entry_id)
    assert await raw.zscore(keys.orphaned("q"), entry_id) == lapsed_ms
    assert await take(raw, worker="other", **OTHERS) == [entry_id]
    assert await run(raw, scripts.set_aside("q", worker="other", entry_id=entry_id, **WAIT)) == 1
    entries, _, left_ms = await run(raw, scripts.take("q", worker="other", count=1, **OTHERS, **LIMITS))
    assert (entries, 0 < left_ms <= 1000) == ([], True)
    assert await take(raw, worker="friend", **ALIKE) == [entry_id]


async def test_after_the_time_any_worker_has_it_and_keeps_it(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await takes(raw)
    await is_left_alike(raw, entry_id, 5000)
    await raw.zadd(keys.orphaned("q"), {entry_id: await clock_ms(raw) - 5000})
    assert await take(raw, worker="other", **OTHERS) == [entry_id]
    assert await run(raw, scripts.set_aside("q", worker="other", entry_id=entry_id, **WAIT)) == 0
    assert (await owners(raw))["other"] == 1


async def test_a_hand_back_begins_the_time_anew_and_one_that_is_left_for_good_has_none(raw: RedisClient) -> None:
    entry_id = await add(raw)
    await takes(raw)
    await raw.zadd(keys.orphaned("q"), {entry_id: 1})
    await gives_way(raw, entry_id)
    assert (await raw.zscore(keys.orphaned("q"), entry_id) or 0) > await clock_ms(raw) - 60_000
    assert await take(raw, worker="had", **OTHERS) == [entry_id]
    await raw.set(keys.heartbeat("q", set_aside_for("A/a")), "x")
    assert await run(raw, scripts.set_aside("q", worker="had", entry_id=entry_id, kind="A/a")) == 1
    assert await take(raw, worker="other", kinds=("A", "A/b"), exact_wait_ms=0) == []
    assert await take(raw, worker="friend", **ALIKE) == [entry_id]


@pytest.mark.parametrize("why", ["none lives", "nobody lost it", "no time", "from a clock ahead"])
async def test_it_is_left_to_nobody(raw: RedisClient, why: str) -> None:
    entry_id = await add(raw)
    await takes(raw)
    now = await clock_ms(raw)
    await raw.zadd(keys.alike("q", "A/a"), {"friend": now - 1 if why == "none lives" else FOREVER_MS})
    if why != "nobody lost it":
        await raw.zadd(keys.orphaned("q"), {entry_id: now + 10**9 if "clock" in why else now})
    how = {**WAIT, "wait_ms": 0 if why == "no time" else 5000}
    assert await run(raw, scripts.set_aside("q", worker="had", entry_id=entry_id, **how)) == 0
    assert (await owners(raw))["had"] == 1


async def test_workers_with_room_are_woken(raw: RedisClient) -> None:
    """The first step wakes as many as a dead worker had entries, the second those that round alike."""
    for name in ("had", "full", "friend", "stranger"):
        await raw.xgroup_create(keys.nudges("q", name), keys.GROUP, id="0", mkstream=True)
    await raw.zadd(keys.room("q"), {"full": 0, "friend": 3, "stranger": 1})
    entry_id = await add(raw)
    await takes(raw)
    await loses_its_worker(raw, entry_id)
    assert [await raw.xlen(keys.nudges("q", name)) for name in ("full", "friend", "stranger")] == [0, 1, 0]
    await take(raw, worker="had")
    await raw.xtrim(keys.nudges("q", "friend"), maxlen=0)
    await raw.zadd(keys.alike("q", "A/a"), {"friend": FOREVER_MS, "full": FOREVER_MS})
    await raw.zadd(keys.orphaned("q"), {entry_id: await clock_ms(raw)})
    assert await run(raw, scripts.set_aside("q", worker="had", entry_id=entry_id, **WAIT)) == 1
    assert [await raw.xlen(keys.nudges("q", name)) for name in ("full", "friend")] == [0, 1]
