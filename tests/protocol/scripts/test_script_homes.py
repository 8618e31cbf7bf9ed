"""Prompts with the same beginning go to one worker while it has capacity, and wait for no other for long."""

from __future__ import annotations

import time
from collections import Counter
from hashlib import sha1
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from tests.protocol.scripts.script_calls import STREAM, put_back, run
from tests.support.redis_servers.streams import add_entry, read_raw_stream, text_of

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}
WORKERS = ("w0", "w1", "w2", "w3")
LONG = 10**7  # ms


async def serve(redis: RedisClient, *workers: str, ttl_ms: int = LONG) -> None:
    """Has workers serve, as their first beats do."""
    for worker in workers:
        command = scripts.beat(
            "q",
            worker=worker,
            instance=worker,
            ttl_ms=ttl_ms,
            is_serving=True,
            must_match=False,
            card={"digest": "d"},
            model_ttl_ms=ttl_ms,
        )
        scripts.parse_beat(await run(redis, command))


async def have_room(redis: RedisClient, **free: int) -> None:
    await redis.zadd(keys.room("q"), free)


async def add(redis: RedisClient, affinity: str, **fields: str) -> str:
    body: Any = {"prompt": "hello", "affinity": affinity, **fields}
    return await add_entry(redis, STREAM, body)


async def take(redis: RedisClient, worker: str, count: int = 1, **more: Any) -> tuple[list[str], int | None]:
    """Returns entries, and after how many ms one may be taken that was left."""
    command = scripts.take("q", worker=worker, count=count, **{**LIMITS, "steal_after_ms": LONG, **more})
    entries, _, left_ms = await run(redis, command)
    return [entry[0].decode() for entry in entries], left_ms


async def home_of(redis: RedisClient, affinity: str, workers: tuple[str, ...] = WORKERS) -> str:
    """Finds the home: the worker that gets the entry where all have capacity."""
    await have_room(redis, **dict.fromkeys(workers, 1))
    entry = await add(redis, affinity)
    for worker in workers:
        if (await take(redis, worker))[0] == [entry]:
            await have_room(redis, **dict.fromkeys(workers, 1))
            return worker
    raise AssertionError("nobody is given it")


async def test_equal_beginnings_have_one_home_and_homes_are_spread(raw: RedisClient) -> None:
    await serve(raw, *WORKERS)
    homes = {f"a{number}": await home_of(raw, f"a{number}") for number in range(64)}
    assert {name: await home_of(raw, name) for name in homes} == homes
    counts = Counter(homes.values())
    assert set(counts) == set(WORKERS)
    assert max(counts.values()) <= 32


BEGINNING = "x" * 1000
BODIES: dict[str, tuple[dict[str, str], str | None]] = {
    "a long prompt": ({"prompt": BEGINNING + "a"}, BEGINNING),
    "another that begins so": ({"prompt": BEGINNING + "b"}, BEGINNING),
    "messages that begin so": ({"messages": BEGINNING + "c"}, BEGINNING),
    "just long enough": ({"prompt": BEGINNING}, BEGINNING),
    "too short": ({"prompt": BEGINNING[1:]}, None),
    "another field": ({"prompt": "x", "stop": BEGINNING}, None),
    "with a word for it before": ({"affinity": "a", "prompt": BEGINNING}, "a"),
    "with a word for it behind": ({"prompt": BEGINNING, "affinity": "a"}, "a"),
    "the word alone": ({"prompt": "x", "affinity": "a"}, "a"),
    "with what is not a word": ({"affinity": "a b", "prompt": BEGINNING}, BEGINNING),
}


@pytest.mark.parametrize("name", BODIES)
async def test_at_home_are_prompts_by_how_they_begin_or_what_they_say(raw: RedisClient, name: str) -> None:
    body, expected = BODIES[name]
    await raw.xadd(STREAM, body)  # type: ignore[arg-type]
    await take(raw, "w", 0)
    [member] = await raw.zrange(keys.lane("q", ""), 0, -1)
    slot = "" if expected is None else str(int(sha1(expected.encode()).hexdigest()[:8], 16) % 1024)
    assert text_of(member).split("/")[2] == slot


async def test_who_comes_or_goes_moves_its_own_alone(raw: RedisClient) -> None:
    await serve(raw, *WORKERS[:3])
    before = {f"a{number}": await home_of(raw, f"a{number}") for number in range(48)}
    assert set(before.values()) == set(WORKERS[:3])
    await serve(raw, "w3")
    with_new = {name: await home_of(raw, name) for name in before}
    assert "w3" in with_new.values()
    assert all(with_new[name] in (before[name], "w3") for name in before)
    await run(raw, scripts.leave("q", worker="w3", instance="w3", card={}))
    after = {name: await home_of(raw, name) for name in before}
    assert set(after.values()) == set(WORKERS[:3])
    assert all(after[name] == with_new[name] for name in before if with_new[name] != "w3")


@pytest.mark.parametrize("seed", range(2, 7))
async def test_few_beginnings_are_spread_too(raw: RedisClient, seed: int) -> None:
    await serve(raw, *WORKERS)
    counts = Counter([await home_of(raw, f"{seed}-{number}") for number in range(8)])
    assert max(counts.values()) <= 3
    await serve(raw, "late")
    counts = Counter([await home_of(raw, f"{seed}-{number}", (*WORKERS, "late")) for number in range(8)])
    assert counts["late"] <= 2
    assert max(counts.values()) <= 3


async def test_an_entry_is_left_to_its_home_and_that_is_told(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    await raw.xgroup_create(keys.nudges("q", home), keys.GROUP, id="0", mkstream=True)
    entry = await add(raw, "x")
    found, left_ms = await take(raw, other)
    assert found == []
    assert left_ms is not None
    assert await raw.xlen(keys.nudges("q", home)) == 1
    assert await take(raw, home) == ([entry], None)
    assert not await raw.exists(keys.passed("q"))


async def test_what_was_left_and_need_not_run_is_forgotten(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    entry = await add(raw, "x")
    assert (await take(raw, "w1" if home == "w0" else "w0"))[0] == []
    assert await raw.exists(keys.passed("q"))
    await raw.sadd(keys.cancelled("q"), entry)
    found, *_ = await run(raw, scripts.sweep("q", worker="w", count=1, **LIMITS))
    assert [each[0].decode() for each in found] == [entry]
    assert not await raw.exists(keys.passed("q"))


async def test_what_was_left_for_long_goes_to_anybody(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    entry = await add(raw, "x")
    assert (await take(raw, other))[0] == []
    await raw.zadd(keys.passed("q"), {entry: 1000 * time.time() - 600})
    assert await take(raw, other, steal_after_ms=500) == ([entry], None)


async def test_what_was_left_by_a_clock_that_was_ahead_is_left_from_now_on(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    entry = await add(raw, "x")
    seconds, _ = await raw.time()
    await raw.zadd(keys.passed("q"), {entry: 1000 * (seconds + 90)})
    found, left_ms = await take(raw, other, steal_after_ms=5000)
    assert found == []
    assert 0 < (left_ms or 0) <= 5000
    now_s, _ = await raw.time()
    assert 1000 * seconds <= float(await raw.zscore(keys.passed("q"), entry) or 0) < 1000 * (now_s + 1)


@pytest.mark.parametrize(("num_workers", "window"), [(2, 32), (64, 16), (200, 8)])
async def test_so_many_entries_of_a_tenant_are_looked_at(raw: RedisClient, num_workers: int, window: int) -> None:
    await serve(raw, "w0", "w1")
    homes = {name: await home_of(raw, name) for name in "abcdefgh"}
    mine, theirs = (next(name for name in homes if homes[name] == worker) for worker in ("w0", "w1"))
    seconds, _ = await raw.time()
    names = ["w0", "w1", *(f"idle{number}" for number in range(num_workers - 2))]
    await raw.zadd(keys.serving("q"), dict.fromkeys(names, 1000 * seconds + LONG))
    for _ in range(window):
        await add(raw, theirs)
    own = await add(raw, mine)
    assert (await take(raw, "w0"))[0] == []
    assert len((await take(raw, "w1"))[0]) == 1
    assert (await take(raw, "w0"))[0] == [own]


async def test_a_home_without_room_is_none_but_its_own_go_first_elsewhere(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    homes = {name: await home_of(raw, name) for name in "abcdefgh"}
    assert set(homes.values()) == {"w0", "w1"}
    entries = {await add(raw, name): homes[name] for name in homes}
    await have_room(raw, w0=0, w1=0)
    taken = [(await take(raw, "w1"))[0][0] for _ in entries]
    of_own = sum(home == "w1" for home in homes.values())
    assert [entries[entry] for entry in taken] == ["w1"] * of_own + ["w0"] * (8 - of_own)


async def test_a_full_home_keeps_what_has_just_come_for_as_long_as_its_prompt_takes(
    raw: RedisClient,
) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    await have_room(raw, w0=0, w1=0)
    large = await add(raw, "x", system="y" * 4_000_000)
    found, left_ms = await take(raw, other)
    assert found == []
    assert 0 < (left_ms or 0) <= 100_100  # what 4 MB and the fields around them take
    assert not await raw.exists(keys.passed("q"))
    assert await take(raw, home) == ([large], None)
    await raw.delete(STREAM)
    await raw.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
    old: Any = {"prompt": "y" * 4000, "affinity": "x"}
    entry = await add_entry(raw, STREAM, old, entry_id="1700000000000-0")
    assert await take(raw, other) == ([entry], None)


async def test_a_new_entry_is_left_to_its_home_though_that_is_full(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    await raw.xgroup_create(keys.nudges("q", home), keys.GROUP, id="0", mkstream=True)
    await have_room(raw, w0=0, w1=0)
    large = await add(raw, "x", system="y" * 4_000_000)
    await raw.xreadgroup(keys.GROUP, other, {STREAM: ">"})
    command = scripts.pass_on("q", worker=other, entry_id=large, lowest=-1000, room=3, steal_after_ms=LONG)
    assert await run(raw, command) == 1
    assert not await raw.xlen(keys.nudges("q", home))  # it looks by itself once it has room
    assert await take(raw, home) == ([large], None)
    small = await add(raw, "x")
    await raw.xreadgroup(keys.GROUP, other, {STREAM: ">"})
    command = scripts.pass_on("q", worker=other, entry_id=small, lowest=-1000, room=3, steal_after_ms=0)
    assert await run(raw, command) == 0


async def test_a_dead_worker_is_no_home(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    homes = {name: await home_of(raw, name) for name in "abcdefgh"}
    await have_room(raw, w0=9, w1=9)
    await raw.zadd(keys.serving("q"), {"w0": 1})  # its heartbeat has lapsed
    entries = [await add(raw, name) for name in homes]
    assert (await take(raw, "w1", 8))[0] == entries


async def test_what_is_left_keeps_nobody_else_waiting(raw: RedisClient) -> None:
    """The tenant's next entries, other tenants and lower priorities do not wait for it."""
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    left = [await add(raw, "x", tenant="a", priority="5") for _ in range(3)]
    next_one = await add_entry(raw, STREAM, {"prompt": "no home", "tenant": "a", "priority": "5"})
    of_others = [await add_entry(raw, STREAM, {"prompt": "p", "tenant": name}) for name in ("b", "c")]
    found, _ = await take(raw, other, 9)
    assert found == [next_one, *of_others]
    assert (await take(raw, home, 9))[0] == left


async def test_long_prompts_that_begin_alike_are_at_home_together(raw: RedisClient) -> None:
    await serve(raw, *WORKERS)
    await have_room(raw, **dict.fromkeys(WORKERS, 9))
    ids = [await add_entry(raw, STREAM, {"prompt": "x" * 1000 + str(number)}) for number in range(6)]
    takers = {worker: (await take(raw, worker, 9))[0] for worker in WORKERS}
    assert sorted(takers.values()) == [[], [], [], ids]


async def test_a_new_entry_is_passed_on_to_its_home_or_to_one_with_room(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    await have_room(raw, w0=3, w1=3)
    entry = await add(raw, "x")
    await raw.xreadgroup(keys.GROUP, other, {STREAM: ">"})
    assert await run(raw, scripts.pass_on("q", worker=other, entry_id=entry, lowest=-1000, room=3)) == 1
    assert (await take(raw, home))[0] == [entry]
    await raw.zadd(keys.room("q"), {home: 0})
    entry = await add(raw, "x")
    await raw.xreadgroup(keys.GROUP, other, {STREAM: ">"})
    assert await run(raw, scripts.pass_on("q", worker=other, entry_id=entry, lowest=-1000, room=3)) == 0
    assert await raw.xpending_range(STREAM, keys.GROUP, entry, entry, 1, other)
    await raw.zadd(keys.room("q"), {home: 3, other: 0})  # this one runs only what others give way to
    assert await run(raw, scripts.pass_on("q", worker=other, entry_id=entry, lowest=0, room=0)) == 1
    assert (await take(raw, home))[0] == [entry]


async def test_what_is_passed_on_waits_like_the_rest_and_its_home_is_told(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    other = "w1" if home == "w0" else "w0"
    await have_room(raw, w0=3, w1=3)
    for name in ("w0", "w1"):
        await raw.xadd(keys.nudges("q", name), {"look": "again"}, id="1-0")
    entry = await add(raw, "x", id="r", timeout_s="60")
    await raw.xreadgroup(keys.GROUP, other, {STREAM: ">"})
    assert await run(raw, scripts.pass_on("q", worker="w2", entry_id=entry, lowest=-1000, room=3)) == 0  # not w2's
    assert await run(raw, scripts.pass_on("q", worker=other, entry_id=entry, lowest=-1000, room=3)) == 1
    assert await raw.hgetall(keys.named("q")) == {b"r": entry.encode()}
    assert await raw.zrange(keys.due("q"), 0, -1) == [entry.encode()]
    assert await raw.hget(keys.backlog("q"), "0 entries") == b"1"
    assert await raw.zrange(keys.passed("q"), 0, -1) == [entry.encode()]
    assert [await raw.xlen(keys.nudges("q", name)) for name in ("w0", "w1")] == [1, 1]
    assert await read_raw_stream(raw, keys.nudges("q", home)) != await read_raw_stream(raw, keys.nudges("q", other))
    assert [entry_id for entry_id, _ in await read_raw_stream(raw, keys.nudges("q", other))] == [b"1-0"]
    await raw.zadd(keys.passed("q"), {entry: 5})
    await raw.xclaim(STREAM, keys.GROUP, other, 0, [entry])
    await raw.delete(keys.nudges("q", home))
    assert await run(raw, scripts.pass_on("q", worker=other, entry_id=entry, lowest=-1000, room=3)) == 1
    assert await raw.zscore(keys.passed("q"), entry) == 5  # it has been left since then
    assert not await raw.exists(keys.nudges("q", home))  # nobody reads it


async def test_what_is_at_home_here_or_nowhere_is_kept_by_who_has_room(raw: RedisClient) -> None:
    await serve(raw, "w0", "w1")
    home = await home_of(raw, "x")
    await have_room(raw, w0=3, w1=3)
    for entry in (await add(raw, "x"), await add_entry(raw, STREAM, {"prompt": "p"})):
        await raw.xreadgroup(keys.GROUP, home, {STREAM: ">"})
        assert await run(raw, scripts.pass_on("q", worker=home, entry_id=entry, lowest=-1000, room=3)) == 0
        assert await raw.xpending_range(STREAM, keys.GROUP, entry, entry, 1, home)


async def test_nothing_is_passed_on_to_who_does_not_serve(raw: RedisClient) -> None:
    await serve(raw, "w0")
    await have_room(raw, drains=3, lapsed=3)
    await raw.zadd(keys.serving("q"), {"lapsed": 1})
    entry = await add_entry(raw, STREAM, {"prompt": "p"})
    await raw.xreadgroup(keys.GROUP, "w0", {STREAM: ">"})
    assert await run(raw, scripts.pass_on("q", worker="w0", entry_id=entry, lowest=-1000, room=0)) == 0


async def test_who_goes_on_serving_takes_nobody_s_homes(raw: RedisClient) -> None:
    """Others keep homes for which it weighs more, as it has had its share."""
    await serve(raw, "w0", "w1")
    homes = {str(slot).encode(): b"w0" for slot in range(64)}
    await raw.hset(keys.homes("q"), mapping=homes)  # type: ignore[arg-type]
    await serve(raw, "w1")
    assert await raw.hgetall(keys.homes("q")) == homes
    await run(raw, scripts.leave("q", worker="w1", instance="w1", card={}))
    await serve(raw, "w1")
    assert set((await raw.hgetall(keys.homes("q"))).values()) == {b"w0", b"w1"}


async def test_low_priorities_are_passed_on_by_one_that_is_full(raw: RedisClient) -> None:
    await serve(raw, "w0")
    low = await add_entry(raw, STREAM, {"prompt": "p", "priority": "-1"})
    high = await add_entry(raw, STREAM, {"prompt": "p"})
    await raw.xreadgroup(keys.GROUP, "w0", {STREAM: ">"})
    assert await run(raw, scripts.pass_on("q", worker="w0", entry_id=low, lowest=0, room=0)) == 1
    assert await run(raw, scripts.pass_on("q", worker="w0", entry_id=high, lowest=0, room=0)) == 0
    assert (await take(raw, "w0", lowest=0))[0] == []
    assert (await take(raw, "w0"))[0] == [low]


async def test_what_is_put_back_goes_before_what_came_after_it(raw: RedisClient) -> None:
    ids = [await add_entry(raw, STREAM, {"prompt": "p", "tenant": "a"}) for _ in range(4)]
    assert (await take(raw, "w0", 2))[0] == ids[:2]
    service = await raw.zrange(keys.band("q", 0), 0, -1, withscores=True)
    assert await put_back(raw, "w1", ids[:1]) == 0  # it is not that one's
    assert await put_back(raw, "w0", [ids[1], ids[0], ids[3]]) == 2
    assert await raw.zrange(keys.band("q", 0), 0, -1, withscores=True) == service
    assert (await take(raw, "w0", 4))[0] == ids
    charged = await raw.hgetall(keys.charged("q"))
    assert len(charged) == 4
