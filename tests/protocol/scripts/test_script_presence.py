"""The heartbeat scripts on a real server: one of two processes with a name has it; and what it leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import kind_of, set_aside_for
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.scripts import Beaten, Rival
from tests.protocol.scripts.script_calls import STREAM, owned, owners, run
from tests.support.redis_servers.streams import read_scores

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

BEAT = keys.heartbeat("q", "w")
DRAIN = keys.drain("q", "w")


async def beat(redis: RedisClient, instance: str, ttl_ms: int = 10**6) -> Rival | str:
    """Beats; returns the rival, or else the mark to drain."""
    card = {"model": "m", "worker": "w"}
    command = scripts.beat(
        "q",
        worker="w",
        instance=instance,
        ttl_ms=ttl_ms,
        is_serving=False,
        must_match=True,
        card=card,
        model_ttl_ms=ttl_ms,
    )
    answer = scripts.parse_beat(await run(redis, command))
    return answer.drain_mark if isinstance(answer, Beaten) else answer


async def test_a_beat_sets_and_renews_the_key(raw: RedisClient) -> None:
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT) == b"i"
    await raw.pexpire(BEAT, 1000)
    assert await beat(raw, "i") == ""
    assert await raw.pttl(BEAT) > 1000


async def test_a_beat_tells_which_instance_is_to_drain(raw: RedisClient) -> None:
    await raw.set(DRAIN, "i")
    assert await beat(raw, "i") == "i"


async def test_a_rival_keeps_the_name_until_its_key_lapses(raw: RedisClient) -> None:
    await beat(raw, "first", ttl_ms=60_000)
    rival = await beat(raw, "second")
    assert isinstance(rival, Rival)
    assert rival.instance == "first"
    assert 0 < rival.left_s <= 60
    assert await raw.get(BEAT) == b"first"
    assert 0 < await raw.pttl(BEAT) <= 60_000
    await raw.delete(BEAT)
    assert await beat(raw, "second") == ""


async def test_a_key_without_expiry_is_nobody_s_and_set_aside(raw: RedisClient) -> None:
    await raw.set(BEAT, "by hand")
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT.replace("}:", "}:junk:")) == b"by hand"


async def test_what_is_no_text_is_nobody_s(raw: RedisClient) -> None:
    await raw.lpush(BEAT, "x")
    await raw.lpush(DRAIN, "x")
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT) == b"i"


async def test_leaving_takes_only_one_s_own_heartbeat_and_never_pending_entries(raw: RedisClient) -> None:
    await owned(raw, "a")
    await raw.set(keys.heartbeat("q", "a"), "i-new")
    assert await run(raw, scripts.leave("q", worker="a", instance="i-old", card={})) == 0
    assert await run(raw, scripts.leave("q", worker="a", instance="i-new", card={})) == 2
    assert await owners(raw) == {"a": 1}
    await raw.set(keys.heartbeat("q", "b"), "i")
    await raw.xgroup_createconsumer(STREAM, keys.GROUP, "b")
    assert await run(raw, scripts.leave("q", worker="b", instance="i", card={})) == 2
    assert await owners(raw) == {"a": 1}


CALLS = keys.calls("q")


async def all_there_is(redis: RedisClient, worker: str) -> None:
    """Writes everything that a queue holds of a worker that serves."""
    if not await redis.exists(CALLS):
        await redis.xgroup_create(CALLS, keys.GROUP, id="0", mkstream=True)
    command = scripts.beat(
        "q", worker=worker, instance=worker, ttl_ms=10**6, is_serving=True, must_match=True,
        card={**SAID, "worker": worker}, model_ttl_ms=10**6,
    )  # fmt: skip
    scripts.parse_beat(await run(redis, command))
    await run(redis, scripts.report("q", worker=worker, text="{}", ttl_ms=10**6, listed_ms=10**6))
    await redis.set(keys.drain("q", worker), worker)
    await redis.zadd(keys.room("q"), {worker: 1})
    await redis.xadd(keys.nudges("q", worker), {"look": "again"})
    for stream in (STREAM, CALLS):
        await redis.xgroup_createconsumer(stream, keys.GROUP, worker)


async def traces(redis: RedisClient, worker: str) -> set[str]:
    """Returns the keys that are a worker's, or list it."""
    found = set()
    for key in cast("list[bytes]", await redis.keys("*")):
        kind = await redis.type(key)
        members: list[Any] = []
        if kind == b"zset":
            members = [*await redis.zrange(key, 0, -1)]
        elif kind == b"hash":
            members = [*await redis.hkeys(key), *([await redis.hget(key, "worker")] if key.decode() == CARD else [])]
        elif kind == b"stream" and key.decode() in (STREAM, CALLS):
            members = [consumer["name"] for consumer in await redis.xinfo_consumers(key, keys.GROUP)]
        if key.endswith(b":" + worker.encode()) or worker.encode() in members:
            found.add(key.decode())
    return found


CARD, REPORT, REPORTS = keys.card("q"), keys.report("q", "w"), keys.reports("q")
SAID = {"worker": "w", "digest": "d", "arithmetic": "a"}
KIND, ALIKE, LAPSES = kind_of("d", "a"), keys.alike("q", kind_of("d", "a")), keys.lapses("q")
OF_REQUESTS = {keys.serving("q"), keys.digests("q"), keys.room("q"), keys.nudges("q", "w"), REPORT}
EVERYTHING = OF_REQUESTS | {ALIKE, LAPSES, CARD, REPORTS, BEAT, DRAIN, STREAM, CALLS}


async def leave(redis: RedisClient) -> None:
    assert await run(redis, scripts.leave("q", worker="w", instance="w", card=SAID)) == 1


async def take_back(redis: RedisClient) -> None:
    await run(redis, scripts.unreport("q", worker="w"))


async def retire(redis: RedisClient, stream: str) -> None:
    await redis.delete(BEAT)
    assert await run(redis, scripts.retire("q", stream=stream, consumer="w", count=9)) == 0


@pytest.mark.parametrize(
    ("go", "left"),
    [
        (leave, {REPORT, REPORTS, CARD}),
        (take_back, EVERYTHING - {REPORT, REPORTS}),
        (lambda redis: retire(redis, STREAM), EVERYTHING - OF_REQUESTS - {BEAT, STREAM, LAPSES}),
        (lambda redis: retire(redis, CALLS), EVERYTHING - OF_REQUESTS - {BEAT, CALLS}),
    ],
    ids=["leaves", "takes its report back", "died, seen among requests", "died, seen among calls"],
)
async def test_who_goes_is_nowhere_any_more(
    raw: RedisClient, go: Callable[[RedisClient], Awaitable[None]], left: set[str]
) -> None:
    """Only the report that operators see for a while, a mark that lapses and the card stay; others write
    the card anew.
    """
    for worker in ("w", "other"):
        await all_there_is(raw, worker)
    assert await traces(raw, "w") == EVERYTHING
    others = await traces(raw, "other")
    await go(raw)
    assert await traces(raw, "w") == left
    assert await traces(raw, "other") == others


async def test_the_last_to_leave_takes_the_card_along(raw: RedisClient) -> None:
    await all_there_is(raw, "w")
    assert await run(raw, scripts.leave("q", worker="w", instance="w", card=SAID)) == 2
    assert await traces(raw, "w") == {REPORT, REPORTS}


@pytest.mark.parametrize("stream", [STREAM, CALLS])
async def test_nothing_is_taken_from_one_that_lives(raw: RedisClient, stream: str) -> None:
    await all_there_is(raw, "w")
    await raw.xadd(stream, {"prompt": "x"})
    await raw.xreadgroup(keys.GROUP, "w", {stream: ">"})
    assert await run(raw, scripts.retire("q", stream=stream, consumer="w", count=9)) == -1
    assert await traces(raw, "w") == EVERYTHING
    assert await raw.xpending_range(stream, keys.GROUP, "-", "+", 1, "w")


async def test_calls_of_a_dead_worker_are_nobody_s_in_pages_and_count_no_try(raw: RedisClient) -> None:
    await raw.xgroup_create(CALLS, keys.GROUP, id="0", mkstream=True)
    for _ in range(3):
        await raw.xadd(CALLS, {"call": "tokenize"})
    await raw.xreadgroup(keys.GROUP, "w", {CALLS: ">"})
    for moved, left in ((2, 1), (1, 0), (0, 0)):
        assert await run(raw, scripts.retire("q", stream=CALLS, consumer="w", count=2)) == moved
        assert len(await raw.xpending_range(CALLS, keys.GROUP, "-", "+", 9, "w")) == left
    calls = await raw.xpending_range(CALLS, keys.GROUP, "-", "+", 9)
    assert [(call["consumer"], call["times_delivered"]) for call in calls] == [(keys.UNOWNED.encode(), 1)] * 3


async def test_a_report_lapses_and_nobody_is_listed_for_longer_than_all(raw: RedisClient) -> None:
    await raw.zadd(REPORTS, {"before": 10**14, "gone": 1})  # the server's clock was ahead, and is behind
    await run(raw, scripts.report("q", worker="w", text="{}", ttl_ms=5000, listed_ms=60_000))
    assert 0 < await raw.pttl(REPORT) <= 5000
    (first, before), (second, own) = (await read_scores(raw, REPORTS)).items()
    assert ({first, second}, before) == ({"before", "w"}, own)
    assert 0 < await raw.pttl(REPORTS) <= 60_000


async def test_a_card_is_what_its_author_said_last_and_no_more(raw: RedisClient) -> None:
    for card in ({"worker": "w", "max_n": "3"}, {"worker": "w", "model": "m"}):
        command = scripts.beat(
            "q", worker="w", instance="i", ttl_ms=10**6, is_serving=True, must_match=False, card=card, model_ttl_ms=1
        )
        assert isinstance(scripts.parse_beat(await run(raw, command)), Beaten)
    assert await raw.hgetall(CARD) == {b"worker": b"w", b"model": b"m", b"ttl_ms": b"1000000"}


@pytest.mark.parametrize("is_serving", [True, False])
async def test_what_a_beat_says_lapses_and_one_that_drains_keeps_no_model_waiting(
    raw: RedisClient, is_serving: bool
) -> None:
    await raw.xadd(keys.nudges("q", "w"), {"look": "again"})
    command = scripts.beat(
        "q", worker="w", instance="i", ttl_ms=60_000, is_serving=is_serving, must_match=False,
        card=SAID, model_ttl_ms=90_000,
    )  # fmt: skip
    assert isinstance(scripts.parse_beat(await run(raw, command)), Beaten)
    waited_for = {ALIKE, *(keys.heartbeat("q", set_aside_for(kind)) for kind in ("d", KIND))}
    serves = {keys.serving("q"), *waited_for} if is_serving else set()
    lapses = {BEAT, CARD, keys.digests("q"), keys.nudges("q", "w"), *serves}
    assert {key.decode() for key in cast("list[bytes]", await raw.keys("*"))} - {STREAM, LAPSES} == lapses
    for key in lapses:
        assert 0 < await raw.pttl(key) <= 90_000, key
    assert 3_600_000 < await raw.pttl(LAPSES) <= 3_660_000
