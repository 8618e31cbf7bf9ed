"""Single scripts meet times in the future, as after the server's clock was set back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient, connect
from tests.protocol.scripts.script_calls import STREAM, run
from tests.support.redis_servers.clocks import ShiftedServer
from tests.support.redis_servers.streams import add_entry, read_owners

FAR_S = 100_000.0
YEAR_S = 365 * 86_400.0
LIMITS: dict[str, Any] = {"max_body_bytes": 10_000, "max_bytes": 10**6}


@pytest.fixture
async def raw(shifted: ShiftedServer) -> AsyncIterator[RedisClient]:
    client = connect(shifted.url, decode=False)
    await client.xgroup_create(STREAM, keys.GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()


async def add(redis: RedisClient, **fields: Any) -> str:
    return await add_entry(redis, STREAM, {"prompt": "x", **fields})


async def take(redis: RedisClient, worker: str = "w", **more: Any) -> list[str]:
    entries, *_ = await run(redis, scripts.take("q", worker=worker, count=1, **LIMITS, **more))
    return [entry[0].decode() for entry in entries]


async def serve(redis: RedisClient, worker: str, *, ttl_ms: int = 10**7, card: str = "d") -> Any:
    command = scripts.beat(
        "q",
        worker=worker,
        instance=f"i/{ttl_ms}",
        ttl_ms=ttl_ms,
        is_serving=True,
        must_match=True,
        card={"worker": worker, "weights": card, "digest": card},
        model_ttl_ms=2 * ttl_ms,
    )
    return scripts.parse_beat(await run(redis, command))


@pytest.mark.parametrize("ahead_s", [-50 * YEAR_S, -25 * YEAR_S, -FAR_S, FAR_S, 50 * YEAR_S])
async def test_whatever_year_it_is_what_waits_is_taken_in_its_order(
    shifted: ShiftedServer, raw: RedisClient, ahead_s: float
) -> None:
    running = await add(raw)
    assert await take(raw, "other") == [running]
    low, high = await add(raw), await add(raw, priority=1)
    await take(raw, lowest=1000)  # they get their places
    shifted.set_ahead(ahead_s)
    highest = await add(raw, priority=2)
    assert [await take(raw) for _ in range(4)] == [[highest], [high], [low], []]
    assert (await read_owners(raw, STREAM))[running] == "other"


async def test_nothing_is_overtaken_for_longer_after_a_step_back(shifted: ShiftedServer, raw: RedisClient) -> None:
    """By its id the old entry is yet to come, so nobody knows for how long it has waited."""
    old = await add(raw)
    shifted.set_ahead(-FAR_S)
    for _ in range(4):
        await add(raw, priority=1)
    taken = [await take(raw, max_overtakes=2) for _ in range(3)]
    assert taken[2] == [old]


async def home_and_other(raw: RedisClient, entry: str) -> tuple[str, str]:
    """Returns the worker that is the entry's home, and another that serves."""
    for worker in ("a", "b"):
        await serve(raw, worker)
    await raw.zadd(keys.room("q"), {"a": 1, "b": 1})
    home, other = "b", "a"
    if await take(raw, "a", steal_after_ms=10**6):
        await run(raw, scripts.put_back("q", worker="a", entry_ids=[entry]))
        home, other = other, home
    await raw.zadd(keys.room("q"), {home: 1})
    return home, other


async def test_what_is_left_to_its_home_is_left_no_longer_after_a_step_back(
    shifted: ShiftedServer, raw: RedisClient
) -> None:
    entry = await add(raw, affinity="x")
    _, other = await home_and_other(raw, entry)
    assert await take(raw, other, steal_after_ms=20_000) == []
    assert await raw.zcard(keys.passed("q")) == 1
    shifted.set_ahead(-FAR_S)
    assert await take(raw, other, steal_after_ms=20_000) == []
    shifted.set_ahead(25 - FAR_S)
    assert await take(raw, other, steal_after_ms=20_000) == [entry]


async def test_what_is_at_home_with_a_full_worker_is_not_left_to_it_after_a_step_back(
    shifted: ShiftedServer, raw: RedisClient
) -> None:
    entry = await add(raw, affinity="x", more="y" * 9000)
    home, other = await home_and_other(raw, entry)
    shifted.set_ahead(-FAR_S)
    for worker in ("a", "b"):  # their leases are recent
        await serve(raw, worker)
    await raw.zadd(keys.room("q"), {home: 0})
    assert await take(raw, other, steal_after_ms=10**6) == [entry]


async def test_what_a_dead_worker_can_do_counts_no_longer_after_a_step_back(
    shifted: ShiftedServer, raw: RedisClient
) -> None:
    part = scripts.WorkerCapacity(slots=4, tokens_per_s=100.0, reply_tokens=30.0, token_bytes=4.0)
    measure = scripts.measure("q", every_ms=1000, target_s=60.0, max_bytes=10**6)
    await run(raw, scripts.say("q", worker="w", part=part, every_ms=1000))
    await run(raw, measure)
    assert await raw.hget(keys.load("q"), "workers") == b"1"
    shifted.set_ahead(-FAR_S)
    await run(raw, measure)
    assert await raw.hget(keys.load("q"), "workers") == b"0"


async def test_a_call_that_was_left_alone_is_taken_over_after_a_step_back(
    shifted: ShiftedServer, raw: RedisClient
) -> None:
    calls = keys.calls("q")
    await raw.xgroup_create(calls, keys.GROUP, id="0", mkstream=True)
    await raw.xadd(calls, {"call": "x", "id": "x", "to": "x"})
    await raw.xreadgroup(keys.GROUP, "frozen", {calls: ">"})
    take_over = scripts.take_calls("q", worker="w", count=1, idle_ms=3000, in_hand=(), **LIMITS)
    shifted.set_ahead(-FAR_S)
    await run(raw, scripts.redate_calls("q"))
    assert await run(raw, take_over) == []
    shifted.set_ahead(5 - FAR_S)
    [(_, _, _, _, times)] = await run(raw, take_over)
    assert times == 2


async def reserve(redis: RedisClient) -> Any:
    return scripts.parse_reserve(await run(redis, scripts.reserve("q", worker="w", instance="i", ttl_ms=60_000)))


async def beat(redis: RedisClient) -> Any:
    return await serve(redis, "w")


@pytest.mark.parametrize(
    ("key", "newcomer"),
    [(keys.heartbeat("q", "w"), reserve), (keys.starting("q", "w"), reserve), (keys.heartbeat("q", "w"), beat)],
)
async def test_the_name_of_a_dead_process_is_free_in_time(
    shifted: ShiftedServer, raw: RedisClient, key: str, newcomer: Callable[[RedisClient], Awaitable[Any]]
) -> None:
    await raw.set(key, "dead/10000", px=10_000)
    shifted.set_ahead(-FAR_S)
    rival = await newcomer(raw)
    assert isinstance(rival, scripts.Rival)
    assert rival.left_s <= 10


async def test_the_card_of_a_dead_fleet_lapses_in_time_and_of_workers_that_differ_the_longest_time_counts(
    shifted: ShiftedServer, raw: RedisClient
) -> None:
    await serve(raw, "long", ttl_ms=60_000)
    await serve(raw, "short", ttl_ms=10_000)
    shifted.set_ahead(-FAR_S)
    rival = await serve(raw, "new", ttl_ms=1000, card="other")
    assert isinstance(rival, scripts.OtherModel)
    assert 50 < rival.left_s <= 60
    assert isinstance(await serve(raw, "short", ttl_ms=10_000), scripts.Beaten)
    assert 50_000 < await raw.pttl(keys.card("q")) <= 60_000


async def test_each_heartbeat_is_cut_to_its_own_time_to_live(shifted: ShiftedServer, raw: RedisClient) -> None:
    await serve(raw, "long", ttl_ms=60_000)
    await serve(raw, "short", ttl_ms=10_000)
    await raw.set(keys.heartbeat("q", "before"), "0123456789abcdef", px=10_000)  # from a version that gives no time
    shifted.set_ahead(-FAR_S)
    assert await run(raw, scripts.lapsed("q", ["long", "gone", "short", "before", "unowned/d"])) == [2]
    lives = {name: await raw.pttl(keys.heartbeat("q", name)) for name in ("long", "short", "unowned/d", "before")}
    assert 50_000 < lives["long"] <= 60_000
    assert 0 < lives["short"] <= 10_000
    assert 10_000 < lives["unowned/d"] <= 20_000  # set by `short` last, with twice its time
    assert lives["before"] > 10_000


async def test_who_looks_more_often_does_not_wait_for_who_looks_less(shifted: ShiftedServer, raw: RedisClient) -> None:
    assert await run(raw, scripts.look("q", worker="a", rest_ms=60_000)) == [1, 60_000]
    assert await run(raw, scripts.look("q", worker="b", rest_ms=1000)) == [1, 1000]
    is_first, left_ms = await run(raw, scripts.look("q", worker="a", rest_ms=60_000))
    assert is_first == 0
    assert left_ms <= 1000
    shifted.set_ahead(-FAR_S)
    assert await run(raw, scripts.look("q", worker="a", rest_ms=1000)) == [1, 1000]
