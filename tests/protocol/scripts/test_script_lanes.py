"""The scripts that give entries their places, take them in turn, and charge their tenants."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import Bill
from penstock.protocol.scripts.lanes import NEW_PER_SCRIPT
from tests.protocol.scripts.script_calls import STREAM, give_up_as_before, owners, put_back, run
from tests.support.redis_servers.streams import add_entry, read_owners, read_raw_stream, read_scores, text_of

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}


async def add(redis: RedisClient, count: int = 1, **fields: object) -> list[str]:
    body: dict[Any, Any] = {"prompt": "x" * 40, **{name: str(value) for name, value in fields.items()}}
    return [await add_entry(redis, STREAM, body) for _ in range(count)]


async def take(redis: RedisClient, count: int = 1, *, worker: str = "w", max_overtakes: int = 20) -> list[str]:
    command = scripts.take("q", worker=worker, count=count, max_overtakes=max_overtakes, **LIMITS)
    entries, *_ = await run(redis, command)
    return [entry[0].decode() for entry in entries]


async def sweep(redis: RedisClient, count: int = 10) -> list[str]:
    entries, *_ = await run(redis, scripts.sweep("q", worker="w", count=count, **LIMITS))
    return [entry[0].decode() for entry in entries]


async def counters(redis: RedisClient) -> dict[str, float]:
    """Returns what each tenant has been served, as far as it is known."""
    found = await read_scores(redis, keys.service("q"))
    for band in await read_scores(redis, keys.bands("q")):
        found |= await read_scores(redis, keys.band("q", band))
    return found


async def lanes_are_empty(redis: RedisClient) -> bool:
    return not await redis.exists(keys.bands("q"), keys.due("q"), keys.named("q")) and not await redis.keys(
        "penstock:{q}:lanes:tenant:*"
    )


async def test_a_higher_priority_overtakes_all_that_wait(raw: RedisClient) -> None:
    low = await add(raw, 300, tenant="a")
    (high,) = await add(raw, tenant="b", priority=1)
    assert await take(raw, 0) == []  # the first run gives places to no more than it may hold the server up for
    assert NEW_PER_SCRIPT < 300
    assert await take(raw, 2) == [high, low[0]]


async def test_the_highest_of_several_and_below_none(raw: RedisClient) -> None:
    entries = {priority: (await add(raw, priority=priority))[0] for priority in (-1000, 0, 1000, 7, -1)}
    assert await take(raw, 5) == [entries[priority] for priority in (1000, 7, 0, -1, -1000)]


async def test_who_was_served_least_is_next_and_nobody_waits_for_a_crowd(raw: RedisClient) -> None:
    crowd = await add(raw, 20, tenant="crowd")
    few = await add(raw, 3, tenant="few")
    taken = await take(raw, 6)
    assert sorted(taken) == sorted([*crowd[:3], *few])
    assert await take(raw, 2) == crowd[3:5]


async def test_shares_are_as_weights(raw: RedisClient) -> None:
    await raw.hset(keys.weights("q"), mapping={"a": 3, "b": "no number"})
    of = dict.fromkeys(await add(raw, 40, tenant="a"), "a") | dict.fromkeys(await add(raw, 40, tenant="b"), "b")
    for _ in range(8):
        await take(raw, 5)
    assert await take(raw, 0) == []
    assert Counter(of[entry_id] for entry_id in await read_owners(raw, STREAM, "w")) == {"a": 30, "b": 10}


async def test_within_a_tenant_what_is_due_first(raw: RedisClient) -> None:
    (window,) = await add(raw, tenant="a", timeout_s=86_400)
    (usual,) = await add(raw, tenant="a")
    (urgent,) = await add(raw, tenant="a", timeout_s=5)
    assert await take(raw, 3) == [urgent, usual, window]


async def test_who_comes_back_cannot_claim_what_it_did_not_ask_for(raw: RedisClient) -> None:
    """A little is allowed: its lane may have been empty for a moment only."""
    await add(raw, 30, tenant="steady", prompt="x" * 8176)
    await take(raw, 20)
    await add(raw, 30, tenant="new", prompt="x" * 8176)
    taken: list[str] = []
    for _ in range(7):
        entries, *_ = await run(raw, scripts.take("q", worker="w", count=2, **LIMITS))
        taken += [dict(zip(entry[3][::2], entry[3][1::2], strict=True))[b"tenant"].decode() for entry in entries]
    assert taken[:4] == ["new"] * 4  # some 2,050 tokens each, where 8,192 are made up for
    assert abs(Counter(taken[4:])["new"] - 5) <= 1


async def test_a_band_of_ones_own_is_entered_as_any_other(raw: RedisClient) -> None:
    """The service of a tenant that has left does not matter to one that comes with a priority of its own."""
    (entry,) = await add(raw, tenant="heavy")
    await take(raw)
    await run(raw, scripts.ack("q", worker="w", bills=[Bill(entry, "heavy", 1_000_000)]))
    (entry,) = await add(raw, tenant="heavy")
    await take(raw)
    await add(raw, 50, tenant="crowd")
    await take(raw, 0)
    await raw.zadd(keys.band("q", 0), {"crowd": 17})
    await add(raw, tenant="light", priority=9)
    (usual,) = await add(raw, tenant="light")
    assert usual in await take(raw, 3)


async def test_who_comes_to_a_band_of_its_own_had_as_much_as_the_least_of_all(raw: RedisClient) -> None:
    for priority, counter in ((-1, 90_000), (0, 50_000), (1, 70_000)):
        await add(raw, tenant=f"t{priority}", priority=priority)
        await take(raw, 0)
        await raw.zadd(keys.band("q", priority), {f"t{priority}": counter})
    await add(raw, tenant="new", priority=9)
    await take(raw, 0)
    assert await raw.zrange(keys.band("q", 9), 0, -1, withscores=True) == [(b"new", 50_000 - 8192)]


@pytest.mark.parametrize(("num_bands", "is_known"), [(16, False), (17, True)])
async def test_nobody_is_forgotten_while_some_were_not_looked_at(
    raw: RedisClient, num_bands: int, is_known: bool
) -> None:
    """The last of the bands has a tenant that was served less than those that left."""
    for priority in range(num_bands):
        await add(raw, tenant=f"t{priority}", priority=priority)
    await take(raw, 0)
    for priority in range(num_bands):
        await raw.zadd(keys.band("q", priority), {f"t{priority}": 10 if priority == 16 else 50_000})
    await raw.zadd(keys.service("q"), {"left": 20})
    await add(raw, tenant="new")
    await take(raw, 0)
    assert ("left" in await counters(raw)) == is_known


@pytest.mark.parametrize("weight", ["-2", "0", "inf", "nan", "x"])
async def test_a_weight_that_is_none_is_one(raw: RedisClient, weight: str) -> None:
    await raw.hset(keys.weights("q"), "a", weight)
    first, second = await add(raw, 2, tenant="a")
    await take(raw, 2)
    await run(raw, scripts.charge("q", worker="w", bills=[Bill(first, "a", 500), Bill(second, "a", 500)]))
    assert await counters(raw) == {"a": 1000}


async def test_who_waits_with_a_low_priority_saves_nothing_up_for_a_high_one(raw: RedisClient) -> None:
    await add(raw, tenant="saver", priority=-1000)
    await add(raw, 30, tenant="steady", prompt="x" * 8176)
    await take(raw, 20)
    await add(raw, 30, tenant="saver", prompt="x" * 8176)
    first = set(await take(raw, 10))
    of_saver = {entry[0].decode() for entry in await read_raw_stream(raw, STREAM) if entry[1][b"tenant"] == b"saver"}
    assert 5 <= len(first & of_saver) <= 8


async def test_the_oldest_is_found_behind_any_crowd(raw: RedisClient) -> None:
    old = await add_entry(raw, STREAM, {"tenant": "z", "priority": "-5"}, entry_id="1700000000000-0")
    (young,) = await add(raw, tenant="z", priority=-5)
    high = await add(raw, 10, tenant="a", priority=5)
    assert await take(raw, 2) == high[:2]
    assert await take(raw, 2, max_overtakes=0) == [old, high[2]]
    assert await take(raw, 1, max_overtakes=0) == high[3:4]  # what has just come is not overtaken for long
    assert await take(raw, 20) == [*high[4:], young]
    assert await lanes_are_empty(raw)


@pytest.mark.parametrize(("waited_s", "is_next"), [(2, False), (10, True)])
async def test_only_what_has_waited_for_five_seconds_goes_before_others(
    raw: RedisClient, waited_s: int, is_next: bool
) -> None:
    for _ in range(20):
        await raw.delete(STREAM)
        await raw.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
        seconds, _ = await raw.time()
        old = await add_entry(raw, STREAM, {"priority": "-5"}, entry_id=f"{1000 * (seconds - waited_s)}-0")
        (high,) = await add(raw, priority=5)
        taken = await take(raw, max_overtakes=0)
        if (await raw.time())[0] - seconds < 2:  # otherwise the machine was too busy to tell
            break
    assert taken == [old if is_next else high]


async def test_the_oldest_is_overtaken_so_often_by_all_workers_together(raw: RedisClient) -> None:
    old = await add_entry(raw, STREAM, {"tenant": "z", "priority": "-5"}, entry_id="1700000000000-0")
    high = await add(raw, 30, priority=5)
    for place in range(10):
        assert await take(raw, 2, worker=f"w{place}") == high[2 * place : 2 * place + 2]
    command = scripts.take("q", worker="busy", count=1, lowest=0, **LIMITS)
    (entry,), *_ = await run(raw, command)
    assert entry[0].decode() == high[20]  # it takes none of a low priority
    assert await take(raw, 2, worker="other") == [old, high[21]]
    await raw.xadd(STREAM, {"prompt": "x", "priority": "-5"})
    assert await take(raw, 3) == high[22:25]


async def test_what_no_lane_has_is_taken_all_the_same(raw: RedisClient) -> None:
    """Somebody deleted a part of the index, or all of it."""
    ids = await add(raw, 4, tenant="a")
    await take(raw, 0)
    await raw.delete(keys.lane("q", "a"))
    assert await take(raw, 2) == ids[:2]
    await raw.delete(*await raw.keys("penstock:{q}:lanes:*"))
    assert await take(raw, 9) == ids[2:]
    assert await lanes_are_empty(raw)


async def test_what_a_worker_has_is_not_taken_from_it(raw: RedisClient) -> None:
    """A worker from before lanes retired the consumer that they index, and adopted what it had."""
    first, second = await add(raw, 2)
    await take(raw, 0)
    await give_up_as_before(raw, [second])
    await give_up_as_before(raw, [first], consumer="old")
    assert await take(raw, 5) == []
    assert {name: count for name, count in (await owners(raw)).items() if count} == {"old": 1, keys.UNOWNED: 1}
    await raw.xdel(STREAM, first, second)
    (third,) = await add(raw)
    await take(raw, 0)
    await raw.xdel(STREAM, third)
    assert await take(raw, 5) == []
    assert await lanes_are_empty(raw)


async def test_what_waits_without_a_place_is_taken_all_the_same(raw: RedisClient) -> None:
    """Somebody read it for the waiting consumer, and did no more."""
    ids = await add(raw, 3, tenant="a", timeout_s=60)
    await raw.xreadgroup(keys.GROUP, keys.WAITING, {STREAM: ">"})
    assert await take(raw, 5) == ids
    assert await lanes_are_empty(raw)


async def test_what_is_over_or_cancelled_is_swept(raw: RedisClient) -> None:
    late = await add_entry(raw, STREAM, {"tenant": "a", "timeout_s": "60"}, entry_id="1700000000000-0")
    (own_id,) = await add(raw)
    (named,) = await add(raw, id="named")
    (other,) = await add(raw)
    await raw.set(keys.seen("q", "named"), named)
    await raw.sadd(keys.cancelled("q"), "named", own_id, "unknown", "5-5")
    assert sorted(await sweep(raw)) == sorted([late, own_id, named])
    assert not await raw.exists(keys.cancelled("q"))
    assert await take(raw, 5) == [other]
    assert await lanes_are_empty(raw)


async def test_a_cancel_is_kept_until_its_entry_has_a_place(raw: RedisClient) -> None:
    """Other entries may come before it, and one sweep gives places only to as many as do not hold up the server."""
    await add(raw, 2 * NEW_PER_SCRIPT)
    (own_id,) = await add(raw)
    (named,) = await add(raw, id="named")
    await raw.set(keys.seen("q", "named"), named)
    await raw.sadd(keys.cancelled("q"), "named", own_id)
    swept = [await sweep(raw) for _ in range(4)]
    assert swept[0] == []
    assert {entry for some in swept for entry in some} == {own_id, named}
    assert not await raw.exists(keys.cancelled("q"))


async def test_what_waits_again_keeps_its_deadline_and_its_cancel(raw: RedisClient) -> None:
    late = await add_entry(raw, STREAM, {"tenant": "a", "timeout_s": "60"}, entry_id="1700000000000-0")
    (kept,) = await add(raw, tenant="a", timeout_s=86_400)
    (cancelled,) = await add(raw, id="named")
    assert set(await take(raw, 3, worker="other")) == {late, kept, cancelled}
    assert await sweep(raw) == []
    assert await put_back(raw, "other", [late, kept, cancelled]) == 3
    await raw.set(keys.seen("q", "named"), cancelled)
    await raw.sadd(keys.cancelled("q"), "named")
    assert set(await sweep(raw)) == {late, cancelled}
    assert await take(raw, 3) == [kept]
    assert await lanes_are_empty(raw)


async def test_what_waits_again_has_its_place_among_those_of_its_tenant_and_priority(raw: RedisClient) -> None:
    (batch,) = await add(raw, tenant="a", priority=-5)
    (later,) = await add(raw, tenant="a", priority=-5)
    assert await take(raw) == [batch]
    await add(raw, tenant="b", priority=-6)
    (usual,) = await add(raw, tenant="c")
    await run(raw, scripts.put_back("q", worker="w", entry_ids=[batch]))
    assert await take(raw, 3) == [usual, batch, later]


async def test_only_what_a_worker_has_waits_again_by_it(raw: RedisClient) -> None:
    (entry,) = await add(raw)
    await take(raw, worker="w")
    for worker, times in (("other", 0), ("w", 1), ("w", 0)):
        assert await put_back(raw, worker, [entry, "5-5"]) == times
    assert await take(raw, 2) == [entry]


async def test_a_running_request_is_not_swept(raw: RedisClient) -> None:
    entry = await add_entry(raw, STREAM, {"timeout_s": "60"}, entry_id="1700000000000-0")
    assert await take(raw, worker="other") == [entry]
    await raw.sadd(keys.cancelled("q"), entry)
    assert await sweep(raw) == []
    assert (await owners(raw))["other"] == 1


async def test_a_token_is_charged_once_however_often_it_is_computed(raw: RedisClient) -> None:
    (entry,) = await add(raw, tenant="a")
    await take(raw)

    async def charge(worker: str, tokens: int | None) -> float:
        await run(raw, scripts.charge("q", worker=worker, bills=[Bill(entry, "a", tokens)]))
        return (await counters(raw))["a"]

    before = (await counters(raw))["a"]
    assert before > 0  # by the size of the prompt, until one knows
    assert await charge("w", 100) == 100
    assert await charge("w", 100) == 100
    assert await charge("w", 130) == 130
    assert await charge("w", None) == 130  # nothing new is known
    assert await charge("w", 130) == 130
    assert await charge("other", 500) == 130  # it does not have the entry
    await raw.xclaim(STREAM, keys.GROUP, "heir", 0, [entry])
    assert await charge("w", 150) == 130
    assert await charge("heir", 120) == 120  # some of 130 were never published, and are computed again
    assert await charge("heir", 140) == 140
    for expected in (1, 0):
        assert await run(raw, scripts.ack("q", worker="heir", bills=[Bill(entry, "a", 150)])) == expected
        assert (await counters(raw))["a"] == 150
    assert await charge("heir", 900) == 150
    assert not await raw.exists(keys.charged("q"))


async def test_who_had_less_than_anybody_who_waits_now_is_forgotten(raw: RedisClient) -> None:
    for number in range(100):
        await add(raw, tenant=f"t{number}")
        (entry,) = await take(raw)
        await run(raw, scripts.ack("q", worker="w", bills=[Bill(entry, f"t{number}", 100)]))
    assert len(await counters(raw)) <= 10


async def test_values_that_are_none_are_as_none(raw: RedisClient) -> None:
    bodies: list[dict[str, object]] = [
        {"tenant": "a b"}, {"tenant": "x" * 129}, {"priority": "nan"}, {"priority": "1e3"}, {"priority": 1001},
        {"timeout_s": "nan"}, {"timeout_s": "inf"}, {"timeout_s": -1}, {"timeout_s": ""}, {"priority": "0x10"},
    ]  # fmt: skip
    ids = [(await add(raw, 1, **body))[0] for body in bodies]
    (far,) = [await add_entry(raw, STREAM, {"prompt": "x"}, entry_id=f"{2**63}-0")]
    assert sorted(await take(raw, 20)) == sorted([*ids, far])
    assert await lanes_are_empty(raw)


async def test_values_at_their_limits_are_what_they_say(raw: RedisClient) -> None:
    (week,) = await add(raw, tenant="x" * 128, priority=1000, timeout_s=604_800)
    (lowest,) = await add(raw, tenant="a.b-c:d_9", priority=" -1000 ")
    await add(raw, timeout_s=0)
    await take(raw, 0)
    assert await raw.zrange(keys.bands("q"), 0, -1) == [b"-1000", b"0", b"1000"]
    assert await raw.zrange(keys.due("q"), 0, -1) == [week.encode()]
    for tenant, entry in (("x" * 128, week), ("a.b-c:d_9", lowest)):
        [member] = await raw.zrange(keys.lane("q", tenant), 0, -1)
        ms, number = entry.split("-")
        assert text_of(member)[1:].startswith(f"{number}-{ms}/")


@pytest.mark.parametrize(("size", "expected"), [(40, 5), (20_000, 3)])
async def test_places_are_given_to_a_bounded_number_of_bytes_at_a_time(
    raw: RedisClient, size: int, expected: int
) -> None:
    """The first is read alone, as large ones are, and small ones four at a time, until the bytes are reached."""
    await add(raw, 20, prompt="x" * size)
    limits: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 3 * size}
    _, has_more, _ = await run(raw, scripts.take("q", worker="w", count=0, **limits))
    assert has_more
    assert (await owners(raw))[keys.WAITING] == expected


async def test_an_answer_has_a_bounded_number_of_bytes(raw: RedisClient) -> None:
    ids = await add(raw, 6, tenant="a")
    limits: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 100}
    for start in (0, 2, 4):
        entries, *_ = await run(raw, scripts.take("q", worker="w", count=6, **limits))
        assert [entry[0].decode() for entry in entries] == ids[start : start + 2]


async def test_a_sweep_s_answer_too_and_it_says_that_there_is_more(raw: RedisClient) -> None:
    body = {"prompt": "x" * 40, "timeout_s": "60"}
    late = [await add_entry(raw, STREAM, body, entry_id=f"1700000000000-{number}") for number in range(1, 6)]
    swept, more = [], []
    for _ in range(3):
        command = scripts.sweep("q", worker="w", count=10, max_body_bytes=10_000, max_bytes=100)
        entries, _, has_more = await run(raw, command)
        swept.append([entry[0].decode() for entry in entries])
        more.append(bool(has_more))
    assert swept == [late[:2], late[2:4], late[4:]]
    assert more == [True, True, False]


INDEX = (keys.bands("q"), keys.band("q", 5), keys.band("q", 0), keys.lane("q", "a"), keys.due("q"))


@pytest.mark.parametrize("key", INDEX)
@pytest.mark.parametrize("junk", [("SET", "junk"), ("RPUSH", "junk")])
async def test_lanes_are_made_anew_where_a_key_of_theirs_held_junk(
    raw: RedisClient, key: str, junk: tuple[str, ...]
) -> None:
    """Except for the one take that meets the junk, the order is as before, whatever of the index is gone."""
    priorities = {
        (await add(raw, tenant=tenant, priority=priority, timeout_s=100))[0]: priority
        for tenant, priority in (("b", -5), ("a", 0), ("b", 0), ("a", -5), ("a", 5), ("b", 5))
    }
    assert await take(raw, 0) == []
    await raw.delete(key)
    await raw.execute_command(junk[0], key, *junk[1:])
    priorities[(await add(raw, tenant="a", timeout_s=100))[0]] = 0
    taken = [entry_id for _ in range(2 * len(priorities)) for entry_id in await take(raw)]
    assert (await owners(raw))["w"] == len(priorities)  # some are in no answer, as a script broke that had taken them
    in_order = [priorities[entry_id] for entry_id in taken[1:]]
    assert in_order == sorted(in_order, reverse=True)
