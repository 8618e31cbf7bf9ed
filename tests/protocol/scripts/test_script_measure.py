"""The state of a queue as one hash: waiting entries are counted as they come and go, and wrong counts are made anew."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import WorkerCapacity
from tests.protocol.scripts.script_calls import STREAM, give_up_as_before, run
from tests.support.redis_servers.streams import add_entry

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
USUAL = WorkerCapacity(slots=4, tokens_per_s=100, reply_tokens=30, token_bytes=4)


async def add(redis: RedisClient, count: int = 1, *, at_ms: int | None = None, **fields: object) -> list[str]:
    """Adds entries of 46 bytes and what `fields` take."""
    body: dict[Any, Any] = {"prompt": "x" * 40, **{name: str(value) for name, value in fields.items()}}
    ids = ["*" if at_ms is None else f"{at_ms}-{number + 1}" for number in range(count)]
    return [await add_entry(redis, STREAM, body, entry_id=each) for each in ids]


async def take(redis: RedisClient, count: int, *, worker: str = "w", max_overtakes: int = 20) -> list[str]:
    entries, *_ = await run(redis, scripts.take("q", worker=worker, count=count, max_overtakes=max_overtakes, **LIMITS))
    return [entry[0].decode() for entry in entries]


async def look(redis: RedisClient, *, target_s: float = 10, max_bytes: int = 10**6) -> int:
    return int(await run(redis, scripts.measure("q", every_ms=1000, target_s=target_s, max_bytes=max_bytes)))


async def say(redis: RedisClient, part: WorkerCapacity = USUAL, *, worker: str = "w") -> tuple[int, bool]:
    num_waiting, is_due = await run(redis, scripts.say("q", worker=worker, part=part, every_ms=1000))
    return num_waiting, bool(is_due)


async def measured(
    redis: RedisClient, part: WorkerCapacity = USUAL, *, worker: str = "w", target_s: float = 10, max_bytes: int = 10**6
) -> dict[str, str]:
    """Measures as if nobody had looked for a while."""
    await say(redis, part, worker=worker)
    if await redis.exists(keys.load("q")):
        await redis.hset(keys.load("q"), "at_ms", 0)
    await look(redis, target_s=target_s, max_bytes=max_bytes)
    found: Any = await redis.hgetall(keys.load("q"))
    return {name.decode(): value.decode() for name, value in found.items()}


async def counts(redis: RedisClient) -> dict[str, int]:
    """Returns the counts that are not 0."""
    found: Any = await redis.hgetall(keys.backlog("q"))
    return {name.decode(): int(value) for name, value in found.items() if b"-" not in value[1:] and int(value)}


async def test_what_waits_is_counted_by_priority(raw: RedisClient) -> None:
    await add(raw, 3)
    await add(raw, 2, priority=-5)
    await take(raw, 0)
    size, low = 46, 46 + len("priority-5")
    expected = {"0 entries": 3, "0 bytes": 3 * size, "-5 entries": 2, "-5 bytes": 2 * low}
    assert await counts(raw) == expected
    await take(raw, 2)
    assert await counts(raw) == expected | {"0 entries": 1, "0 bytes": size}
    await take(raw, 5)
    assert await counts(raw) == {}


async def test_what_comes_and_goes_at_once_is_not_counted(raw: RedisClient) -> None:
    await add(raw, 3)
    await raw.config_resetstat()
    assert len(await take(raw, 3)) == 3
    assert "cmdstat_hincrby" not in await raw.info("commandstats")
    assert not await raw.exists(keys.backlog("q"))


async def test_what_is_swept_and_what_is_taken_by_its_age_is_counted_out(raw: RedisClient) -> None:
    (late,) = await add(raw, at_ms=1_700_000_000_000, timeout_s=60)
    (old,) = await add(raw, at_ms=1_700_000_000_001, priority=-1)
    await add(raw)
    await take(raw, 0)
    entries, *_ = await run(raw, scripts.sweep("q", worker="w", count=9, **LIMITS))
    assert [entry[0].decode() for entry in entries] == [late]
    assert (await counts(raw)).keys() == {"-1 entries", "-1 bytes", "0 entries", "0 bytes"}
    assert await take(raw, 1, max_overtakes=0) == [old]
    assert await counts(raw) == {"0 entries": 1, "0 bytes": 46}


async def test_the_numbers(raw: RedisClient) -> None:
    now_ms = time.time_ns() // 10**6
    await add(raw, 2, at_ms=now_ms - 60_000, priority=-5)
    await add(raw, at_ms=now_ms - 20_000)
    await add(raw, 3, at_ms=now_ms - 10_000)
    await add(raw, 2, at_ms=now_ms - 5_000, priority=7)
    await take(raw, 3)  # of 7, and the older one of 0
    found = await measured(raw)
    bands = [tuple(map(int, band.split(":"))) for band in found.pop("bands").split()]
    assert [band[:3] for band in bands] == [(0, 3, 125), (-5, 2, 88)]  # 46 and 56 bytes, 30 tokens of a reply each
    assert 10_000 <= bands[0][3] < 16_000
    assert 60_000 <= bands[1][3] < 65_000
    assert 60_000 <= int(found.pop("oldest_ms")) < 65_000
    assert abs(int(found.pop("at_ms")) - now_ms) < 60_000
    assert found == {
        "waiting": "5", "waiting_tokens": "213", "running": "3", "given_back": "0", "workers": "1", "slots": "4",
        "rate": "100", "worker_rate": "100", "reply_tokens": "30", "token_bytes": "4", "wanted_workers": "1",
    }  # fmt: skip


async def test_what_has_no_place_waits_too(raw: RedisClient) -> None:
    """New entries and returned ones count as large as the others, as far as one knows."""
    now_ms = time.time_ns() // 10**6
    given_back = await add(raw, at_ms=now_ms - 50_000)
    assert await take(raw, 1) == given_back
    await give_up_as_before(raw, given_back)
    await add(raw, 3)
    await take(raw, 0)
    await add(raw, 2)
    found = await measured(raw)
    assert 50_000 <= int(found["oldest_ms"]) < 55_000
    assert (found["waiting"], found["running"], found["given_back"]) == ("6", "0", "1")
    assert found["waiting_tokens"] == str(6 * 30 + 6 * 46 // 4)
    assert found["bands"].startswith("0:3:")


async def test_entries_that_nobody_has_read(raw: RedisClient) -> None:
    await add(raw, 3)
    found = await measured(raw, WorkerCapacity(4, 100))
    assert (found["waiting"], found["bands"], found["oldest_ms"], found["wanted_workers"]) == ("3", "", "0", "1")
    await raw.xgroup_destroy(STREAM, keys.GROUP)
    assert (await measured(raw))["waiting"] == "3"


async def test_an_empty_queue(raw: RedisClient) -> None:
    found = await measured(raw)
    assert (found["waiting"], found["waiting_tokens"], found["wanted_workers"], found["bands"]) == ("0", "0", "0", "")


async def test_one_look_a_second_whoever_comes(raw: RedisClient) -> None:
    assert await say(raw) == (0, True)
    assert await look(raw) == 0
    await add(raw, 2)
    for worker in ("w", "v"):
        assert await say(raw, worker=worker) == (0, False)
        assert await look(raw) == 0
    assert await raw.hget(keys.load("q"), "workers") == b"1"
    await asyncio.sleep(1.1)
    assert await say(raw) == (0, True)
    assert await look(raw) == 2
    assert await say(raw) == (2, False)
    assert await raw.hget(keys.load("q"), "workers") == b"2"
    assert 0 < await raw.pttl(keys.load("q")) <= 3_600_000
    assert 0 < await raw.pttl(keys.workers("q")) <= 3_600_000


async def test_a_clock_that_was_set_back_stops_no_look(raw: RedisClient) -> None:
    await measured(raw)
    await raw.hset(keys.load("q"), "at_ms", time.time_ns() // 10**6 + 3_600_000)
    await add(raw)
    assert await say(raw) == (0, True)
    assert await look(raw) == 1


async def test_a_fleet_is_the_sum_of_what_its_workers_say(raw: RedisClient) -> None:
    await measured(raw, WorkerCapacity(4, 100, 30, 4), worker="a")
    await measured(raw, WorkerCapacity(8, 200, 50, 2), worker="b")
    found = await measured(raw, WorkerCapacity(6), worker="new")
    fleet = {name: found[name] for name in ("workers", "slots", "rate", "worker_rate", "reply_tokens", "token_bytes")}
    assert fleet == {  # the new one is taken to be like the others
        "workers": "3", "slots": "18", "rate": "450", "worker_rate": "150", "reply_tokens": "40", "token_bytes": "3",
    }  # fmt: skip
    assert (await measured(raw, WorkerCapacity(0, 100), worker="a"))["workers"] == "2"  # it drains
    await raw.hset(
        keys.workers("q"), mapping={"b": "1 8 200 50 2", "wrong": "x", "worse": "1 4 x 3 4"}
    )  # it said nothing for long
    found = await measured(raw, WorkerCapacity(6), worker="new")
    known = found["workers"], found["worker_rate"], found["reply_tokens"], found["token_bytes"]
    assert known == ("1", "200", "50", "2")  # as was known last
    assert sorted(await raw.hkeys(keys.workers("q"))) == [b"a", b"new"]
    await add(raw)
    for worker in ("new", "newer", "newest"):
        await raw.hset(keys.load("q"), "worker_rate", 0)
        found = await measured(raw, WorkerCapacity(6), worker=worker)
    assert (found["workers"], found["wanted_workers"]) == ("3", "1")  # no more than there are requests
    await add(raw, 8)
    assert (await measured(raw, WorkerCapacity(6), worker=worker))["wanted_workers"] == "3"  # those that there are


async def test_of_a_large_fleet_some_are_asked_for_all(raw: RedisClient) -> None:
    """Half of a thousand workers are asked, and for their entries one look in two asks the server."""
    await add(raw, 9)
    given_back, *_ = await take(raw, 4)
    await give_up_as_before(raw, [given_back])
    pipeline = raw.pipeline(transaction=False)
    for number in range(600):
        pipeline.xgroup_createconsumer(STREAM, keys.GROUP, f"v{number}")
    await pipeline.execute()
    for _ in range(6):
        now_ms = time.time_ns() // 10**6
        parts: Any = {f"v{number}": f"{now_ms} 4 100 30 4" for number in range(1000)}
        await raw.hset(keys.workers("q"), mapping=parts)
        found = await measured(raw)
        assert (found["workers"], found["slots"], found["rate"]) == ("1001", "4004", "100100")
        assert (found["waiting"], found["running"], found["bands"].split(":")[:2]) == ("6", "3", ["0", "5"])
        assert found["given_back"] == "1"
        await asyncio.sleep(0.001)
    await raw.delete(keys.backlog("q"))
    for _ in range(30):
        found = await measured(raw, max_bytes=50)  # a page is of two entries
        await asyncio.sleep(0.001)
    assert not await raw.hexists(keys.backlog("q"), "cursor")
    assert found["bands"].split(":")[:2] == ["0", "5"]


async def test_a_hash_that_is_none_is_written_over(raw: RedisClient) -> None:
    await raw.set(keys.load("q"), "x")
    await raw.set(keys.workers("q"), "x")
    assert await say(raw) == (0, True)
    assert (await measured(raw))["workers"] == "1"


@pytest.mark.parametrize(
    ("waiting", "running", "part", "target_s", "expected"),
    [
        (0, 0, USUAL, 10, 0),
        (1, 0, USUAL, 10, 1),
        (0, 1, USUAL, 10, 1),
        (0, 9, USUAL, 10, 3),  # 4 at once
        (100, 0, USUAL, 10, 5),  # 4150 tokens, 1000 in 10 s
        (100, 0, USUAL, 100, 1),
        (100, 8, USUAL, 10, 7),  # beside what runs
        (2, 0, WorkerCapacity(4, 1, 30, 4), 1, 2),  # no more than there are requests
        (100, 0, WorkerCapacity(4), 10, 1),  # nothing is known of its speed
        (100, 9, WorkerCapacity(4), 10, 3),
        (3, 0, WorkerCapacity(0), 10, 1),  # none but one that drains
        (0, 9, WorkerCapacity(0), 10, 1),
    ],
)
async def test_wanted_workers(
    raw: RedisClient, waiting: int, running: int, part: WorkerCapacity, target_s: float, expected: int
) -> None:
    await add(raw, running + waiting)
    assert len(await take(raw, running)) == running
    assert (await measured(raw, part, target_s=target_s))["wanted_workers"] == str(expected)


@pytest.mark.parametrize("lost", ["all", "a band", "too few", "too many", "below zero", "something else", "the key"])
async def test_lost_counts_are_made_anew(raw: RedisClient, lost: str) -> None:
    await add(raw, 5)
    await add(raw, 5, priority=3)
    await take(raw, 0)
    before = await counts(raw)
    match lost:
        case "all":
            await raw.delete(keys.backlog("q"))
        case "a band":
            await raw.hdel(keys.backlog("q"), "3 entries", "3 bytes")
        case "too few":
            await raw.hset(keys.backlog("q"), "3 entries", 2)
        case "too many":
            await raw.hset(keys.backlog("q"), "7 entries", 11)
        case "below zero":
            await raw.hset(keys.backlog("q"), "0 entries", -4)
        case "something else":
            await raw.hset(keys.backlog("q"), mapping={"0 entries": "x", "more": "y"})
        case "the key":
            await raw.set(keys.backlog("q"), "x")
    (taken,) = await take(raw, 1)  # whatever is there
    await give_up_as_before(raw, [taken])
    found = await measured(raw)
    (size,) = {before["3 bytes"] // 5}
    before |= {"3 entries": 4, "3 bytes": 4 * size}
    assert await counts(raw) == before
    assert [band.split(":")[:2] for band in found["bands"].split()] == [["3", "4"], ["0", "5"]]
    await take(raw, 10)
    await measured(raw)
    assert not await raw.exists(keys.backlog("q"))


async def test_a_count_that_is_made_anew_in_pages_ends_with_what_waits(raw: RedisClient) -> None:
    """A page is some 100 entries, by their bytes; some are taken before they are counted, some come meanwhile."""
    for number in range(600):
        await add(raw, tenant=f"t{number % 7}", priority=9 if number >= 540 else number % 3)
    for _ in range(3):
        await take(raw, 0)
    await raw.delete(keys.backlog("q"))
    rounds = 0
    while rounds == 0 or await raw.hexists(keys.backlog("q"), "cursor"):
        assert rounds < 100
        found = await measured(raw, max_bytes=6000)
        assert found["waiting"] == str(await raw.xlen(STREAM) - 5 * rounds)
        tokens = int(found["waiting_tokens"]) / int(found["waiting"])
        assert tokens == pytest.approx(30 + 63 / 4, rel=0.02)  # whatever part of them is counted
        await take(raw, 5, max_overtakes=0 if rounds % 2 == 0 else 20)
        await add(raw, 3, tenant="new", priority=rounds % 4)
        await take(raw, 0)
        rounds += 1
    assert rounds > 4
    last = await measured(raw, max_bytes=6000)
    assert not await raw.hexists(keys.backlog("q"), "cursor")
    bands = {int(priority): int(count) for priority, count, *_ in (band.split(":") for band in last["bands"].split())}
    assert sum(bands.values()) == int(last["waiting"]) == 600 - 2 * rounds
    await raw.delete(keys.backlog("q"))
    for _ in range(2):
        exact = await measured(raw)
    for priority, count, *_ in (band.split(":") for band in exact["bands"].split()):
        assert bands[int(priority)] == pytest.approx(int(count), abs=5 * rounds)


async def test_what_comes_while_counts_are_made_anew_is_counted_once(raw: RedisClient) -> None:
    await add(raw, 300)
    for _ in range(2):
        await take(raw, 0)
    await raw.delete(keys.backlog("q"))
    for _ in range(4):
        await measured(raw, max_bytes=4000)
        await add(raw, 5, priority=-7)
        await take(raw, 0)
    assert not await raw.hexists(keys.backlog("q"), "cursor")
    size = 46 + len("priority-7")
    assert await counts(raw) == {
        "0 entries": 300, "0 bytes": 300 * 46, "-7 entries": 20, "-7 bytes": 20 * size
    }  # fmt: skip


async def test_what_was_deleted_by_hand_is_counted_out_in_the_end(raw: RedisClient) -> None:
    deleted, *_ = await add(raw, 4)
    await take(raw, 0)
    await raw.xdel(STREAM, deleted)
    assert (await measured(raw))["waiting"] == "3"
    assert len(await take(raw, 2)) == 2
    for _ in range(2):
        await measured(raw)
    assert (await counts(raw))["0 entries"] == 1


async def test_a_worker_from_before_lanes_takes_what_is_counted(raw: RedisClient) -> None:
    ids = await add(raw, 4)
    await take(raw, 0)
    await give_up_as_before(raw, ids[:1])
    await give_up_as_before(raw, ids[1:3], consumer="old")
    found = await measured(raw)
    assert (found["waiting"], found["running"], (await counts(raw))["0 entries"]) == ("2", "2", 1)


async def test_no_more_bands_than_anybody_would_read(raw: RedisClient) -> None:
    for priority in range(70):
        await add(raw, priority=priority)
    await take(raw, 0)
    found = await measured(raw)
    assert len(found["bands"].split()) == 64
    assert found["bands"].startswith("69:1:")
    assert found["waiting"] == "70"


async def test_the_oldest_of_all_is_known_whoever_overtakes_it(raw: RedisClient) -> None:
    now_ms = time.time_ns() // 10**6
    await add(raw, at_ms=now_ms - 90_000, timeout_s=86_400)
    await add(raw, at_ms=now_ms - 5_000)
    await take(raw, 0)
    found = await measured(raw)
    assert 90_000 <= int(found["bands"].split(":")[3]) == int(found["oldest_ms"]) < 95_000


async def test_the_oldest_of_a_priority_is_of_whoever_was_served_most(raw: RedisClient) -> None:
    now_ms = time.time_ns() // 10**6
    await add(raw, at_ms=now_ms - 90_000, priority=-1)
    await add(raw, at_ms=now_ms - 50_000, tenant="served")
    for tenant in range(30):
        await add(raw, at_ms=now_ms - 40_000 + tenant, tenant=f"t{tenant}")
    await add(raw, at_ms=now_ms - 30_000, tenant="both", priority=-3)
    await add(raw, at_ms=now_ms - 20_000, tenant="both", priority=5)
    await take(raw, 0)
    await raw.zadd(keys.band("q", 0), {"served": 1000})
    found = await measured(raw)
    waited = {band.split(":")[0]: int(band.split(":")[3]) for band in found["bands"].split()}
    assert 20_000 <= waited["5"] < 25_000
    assert 30_000 <= waited["-3"] < 35_000  # behind what the same tenant has with another priority
    assert 50_000 <= waited["0"] < 55_000
    assert 90_000 <= waited["-1"] < 95_000
