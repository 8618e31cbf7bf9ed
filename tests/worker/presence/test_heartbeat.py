"""One name, one process: who has the heartbeat key, who gets it when, who has to stop, and what the dead leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from redis import exceptions
from structlog.testing import capture_logs

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.wire import ModelCard
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken, OtherFleet
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.presence import heartbeat as heartbeats
from penstock.worker.presence.heartbeat import BEATS_PER_READ, RETIRE_COUNT, Heartbeat, Reclaimer
from penstock.worker.redis.guarded import execute_one
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.worker_harness import QUICK, running_worker
from tests.support.redis_servers.refusing_proxy import PASSING, RefusingProxy

pytestmark = pytest.mark.every_server

KEY = keys.heartbeat("q", "w")
SERVING = keys.serving("q")
CARD = keys.card("q")
LONG_S = 1000.0
TAKEN = "another process uses the name 'w' in queue 'q'"

Make = Callable[..., Heartbeat]


@pytest.fixture
def make(raw: RedisClient) -> Make:
    def heartbeat(
        instance: str, ttl_s: float = LONG_S, name: str = "w", *, tokenizer: str = "t", **settings: Any
    ) -> Heartbeat:
        config = WorkerConfig(**{**QUICK, "name": name, "heartbeat_ttl_s": ttl_s, **settings})
        card = ModelCard(model="m", worker=name, version="1", tokenizer=tokenizer, max_n=config.max_n)
        return Heartbeat(raw, config, instance, Readiness(), card)

    return heartbeat


async def started(heartbeat: Heartbeat) -> Heartbeat:
    await asyncio.wait_for(heartbeat.start(asyncio.Event()), WAIT_S)
    return heartbeat


async def renew(raw: RedisClient, heartbeat: Heartbeat) -> None:
    """Beats until the server's clock has moved on, so that others can see it."""
    before_ms = await raw.pexpiretime(KEY)
    async with asyncio.timeout(WAIT_S):
        while await raw.pexpiretime(KEY) <= before_ms:
            assert await heartbeat.beat() == 0


async def test_a_beat_renews_before_the_key_lapses(raw: RedisClient, make: Make) -> None:
    heartbeat = await started(make("one"))
    await raw.pexpire(KEY, 500_000)
    assert await heartbeat.beat() == 0
    assert 500_000 < await raw.pttl(KEY) <= LONG_S * 1000
    assert await raw.get(KEY) == b"one"


async def test_joined_is_said_once_clients_find_the_queue(raw: RedisClient, redis_url: str) -> None:
    """A first request that comes with that line would have 503 from a gateway."""
    before: list[bool] = []
    with capture_logs() as lines:

        def has_joined() -> bool:
            return any(line["event"] == "joined" for line in lines)

        async with RefusingProxy(redis_url) as proxy:
            proxy.on_command = lambda name: before.append(has_joined()) if name == "presence.ANNOUNCE" else None
            async with running_worker(proxy.url, name="w"):
                await eventually(has_joined)
                assert await raw.zscore(keys.queues(), "q") is not None
                assert await raw.zscore(SERVING, "w") is not None
                assert await raw.hgetall(CARD)
    assert not before[0]


async def test_what_clients_do_not_find_is_joined_all_the_same(redis_url: str) -> None:
    """The list of queues may be on another node, in trouble: clients that name the queue are served."""
    with capture_logs() as lines:
        async with RefusingProxy(redis_url) as proxy:
            proxy.refuse(PASSING["BUSY"], "presence.ANNOUNCE")
            async with running_worker(proxy.url, name="w"):
                await eventually(lambda: any(line["event"] == "joined" for line in lines))


async def test_a_running_heartbeat_renews_what_is_there(raw: RedisClient, make: Make) -> None:
    """If a beat set only keys that have lapsed, it would leave the key as it is, and the worker without one in each
    interval.
    """
    heartbeat = await started(make("one", ttl_s=0.3))
    task = asyncio.create_task(heartbeat.run())
    for _ in range(3):
        await raw.set(KEY, "one", px=10**6)
        await eventually(lambda: _lapses_within(raw, 300))
        assert await raw.get(KEY) in (b"one", None)
    task.cancel()


@pytest.mark.parametrize("loss", [("DEL", KEY), ("FLUSHALL",), ("SET", KEY, "")])
async def test_a_key_that_was_lost_is_set_again(raw: RedisClient, make: Make, loss: tuple[str, ...]) -> None:
    heartbeat = await started(make("one"))
    await raw.execute_command(*loss)
    assert await heartbeat.beat() == 0
    assert await raw.get(KEY) == b"one"
    assert await raw.pttl(KEY) > 500_000
    assert not heartbeat.must_drain.is_set()


async def test_junk_in_the_keys_harms_nobody(raw: RedisClient, make: Make) -> None:
    await raw.rpush(KEY, "junk")
    await raw.rpush(keys.drain("q", "w"), "junk")
    heartbeat = await started(make("one"))
    assert await raw.get(KEY) == b"one"
    assert await heartbeat.beat() == 0
    assert not heartbeat.must_drain.is_set()


async def test_a_name_that_is_taken(raw: RedisClient, make: Make) -> None:
    owner, newcomer = await started(make("one")), make("two", ttl_s=0.3)
    start = asyncio.create_task(started(newcomer))
    await eventually(lambda: newcomer.is_contested)
    await renew(raw, owner)
    with pytest.raises(NameTaken, match=TAKEN):
        await start
    assert await raw.get(KEY) == b"one"
    assert await owner.beat() == 0


async def test_a_name_that_no_process_can_have_is_free(raw: RedisClient, make: Make) -> None:
    """The key of a process lapses; this one does not."""
    await raw.set(KEY, "somebody")
    await started(make("one"))
    assert await raw.get(KEY) == b"one"


async def test_a_newcomer_waits_for_the_key_of_a_dead_process(raw: RedisClient, make: Make) -> None:
    await raw.set(KEY, "dead", px=700)
    newcomer = await started(make("two", ttl_s=0.3))  # it looks several times
    assert await raw.get(KEY) == b"two"
    assert not newcomer.must_drain.is_set()
    assert not newcomer.is_contested


async def test_a_newcomer_that_is_told_to_stop_waits_no_longer(raw: RedisClient, make: Make) -> None:
    await raw.set(KEY, "dead", px=10**6)
    newcomer, stop = make("two"), asyncio.Event()
    start = asyncio.create_task(newcomer.start(stop))
    await eventually(lambda: newcomer.is_contested)
    stop.set()
    await asyncio.wait_for(start, WAIT_S)
    await newcomer.stop()
    assert await raw.get(KEY) == b"dead"


async def test_who_finds_a_live_process_in_its_key_stops(raw: RedisClient, make: Make) -> None:
    frozen = await started(make("one"))
    await raw.delete(KEY)  # it lapsed meanwhile
    newcomer = await started(make("two"))
    assert await frozen.beat() > 0
    assert frozen.is_contested
    assert not frozen.must_drain.is_set()  # for all it knows, that one is dead
    await renew(raw, newcomer)
    assert await frozen.beat() > 0
    assert frozen.must_drain.is_set()
    assert TAKEN in str(frozen.must_end)
    await frozen.stop()
    assert await newcomer.beat() == 0
    assert await raw.get(KEY) == b"two"
    assert newcomer.must_end is None


async def test_the_key_of_a_dead_process_stops_nobody(raw: RedisClient, make: Make) -> None:
    """A replica that lagged may still have it when it becomes the primary."""
    heartbeat = await started(make("two"))
    await raw.set(KEY, "one", px=300)
    assert 0 < await heartbeat.beat() <= 0.3
    await eventually(lambda: _is_gone(raw))
    assert await heartbeat.beat() == 0
    assert await raw.get(KEY) == b"two"
    assert not heartbeat.is_contested
    assert not heartbeat.must_drain.is_set()


async def test_of_two_that_both_believe_one_goes_on(raw: RedisClient, make: Make) -> None:
    """A failover put the first one's key back: the one named by the key stays, the other one stops."""
    first, second = await started(make("one")), make("two")
    await raw.set(KEY, "two", px=10**6)
    assert await first.beat() > 0
    await raw.set(KEY, "one", px=900_000)
    assert await first.beat() == 0
    assert await second.beat() > 0
    await renew(raw, first)
    assert await second.beat() > 0
    assert (first.must_drain.is_set(), second.must_drain.is_set()) == (False, True)


async def test_a_queue_is_served_while_its_workers_say_so(raw: RedisClient, make: Make) -> None:
    heartbeat = await started(make("one"))
    assert not await raw.exists(SERVING)  # it may be loading its model
    heartbeat.set_serving(True)
    task = asyncio.create_task(heartbeat.run())
    await eventually(lambda: raw.exists(SERVING))  # at once, not with the next beat
    assert 500_000 < await raw.pttl(SERVING) <= LONG_S * 1000
    heartbeat.set_serving(False)
    await eventually(lambda: _is_unserved(raw))
    task.cancel()
    heartbeat.set_serving(True)
    await heartbeat.beat()
    await heartbeat.stop()
    assert not await raw.exists(SERVING)


async def test_a_queue_is_served_until_its_last_worker_leaves_or_lapses(raw: RedisClient, make: Make) -> None:
    long = await started(make("one"))
    short = await started(make("two", ttl_s=0.3, name="dies"))
    for heartbeat in (long, short):
        heartbeat.set_serving(True)
        await heartbeat.beat()
    assert await raw.pttl(SERVING) > 500_000  # the shorter time to live bounds nobody else's
    await long.stop()
    assert await raw.zrange(SERVING, 0, -1) == [b"dies"]
    await short.beat()
    await eventually(lambda: _is_unserved(raw))  # though nobody took the dead one out


async def test_a_dead_worker_is_taken_out_of_those_that_serve(raw: RedisClient, make: Make) -> None:
    short, long = await started(make("two", ttl_s=0.05, name="dies")), await started(make("one"))
    for heartbeat in (short, long):
        heartbeat.set_serving(True)
        await heartbeat.beat()

    async def is_alone() -> bool:
        await long.beat()
        return await raw.zrange(SERVING, 0, -1) == [b"w"]

    await eventually(is_alone)


async def test_junk_in_the_key_of_those_that_serve_harms_nobody(raw: RedisClient, make: Make) -> None:
    await raw.rpush(SERVING, "junk")
    heartbeat = await started(make("one"))
    heartbeat.set_serving(True)
    await heartbeat.beat()
    assert await raw.zrange(SERVING, 0, -1) == [b"w"]
    await raw.delete(SERVING)
    await raw.rpush(SERVING, "junk")
    await heartbeat.stop()
    assert not await raw.exists(KEY)


async def serving(heartbeat: Heartbeat) -> Heartbeat:
    """Starts the heartbeat of a worker that takes requests."""
    await started(heartbeat)
    heartbeat.set_serving(True)
    assert await heartbeat.beat() == 0
    return heartbeat


async def author(raw: RedisClient) -> bytes | str | None:
    return await raw.hget(CARD, "worker")


async def test_the_card_says_what_is_served_as_long_as_somebody_does(raw: RedisClient, make: Make) -> None:
    one = await serving(make("i1", name="one", max_n=3))
    ours = {b"model": b"m", b"version": b"1", b"tokenizer": b"t", b"ttl_ms": b"1000000"}
    fields = {**ours, b"worker": b"one", b"max_n": b"3"}
    assert await raw.hgetall(CARD) == fields
    assert 500_000 < await raw.pttl(CARD) <= LONG_S * 1000
    two = await serving(make("i2", ttl_s=0.3, name="two"))
    assert await raw.hgetall(CARD) == fields
    assert await raw.pttl(CARD) > 500_000  # the shorter time to live bounds nobody else's
    await one.stop()
    assert await author(raw) == b"one"  # until the next beat
    await two.beat()
    assert await author(raw) == b"two"
    await two.stop()
    assert not await raw.exists(CARD)


async def test_the_card_lapses_with_the_last_worker(raw: RedisClient, make: Make) -> None:
    await serving(make("one", ttl_s=0.3))
    await eventually(lambda: _is_absent(raw, CARD))


async def test_a_worker_that_drains_keeps_the_card_and_leaves_it_to_one_that_serves(
    raw: RedisClient, make: Make
) -> None:
    drains, serves = await serving(make("i1", name="drains")), await serving(make("i2", name="serves"))
    drains.set_serving(False)
    await drains.beat()
    assert await author(raw) == b"drains"
    await serves.beat()
    await drains.beat()
    assert await author(raw) == b"serves"
    await serves.stop()
    assert not await raw.exists(CARD)
    await drains.beat()
    assert await author(raw) == b"drains"


@pytest.mark.parametrize("loss", [("DEL", CARD), ("FLUSHALL",), ("SET", CARD, "junk")])
async def test_a_card_that_was_lost_is_written_again(raw: RedisClient, make: Make, loss: tuple[str, ...]) -> None:
    heartbeat = await serving(make("one"))
    await raw.execute_command(*loss)
    assert await heartbeat.beat() == 0
    assert await author(raw) == b"w"


async def test_a_worker_with_other_tokens_does_not_join(raw: RedisClient, make: Make) -> None:
    there, newcomer = await serving(make("i1")), make("i2", ttl_s=0.3, name="new", tokenizer="other")
    start = asyncio.create_task(started(newcomer))
    await eventually(lambda: newcomer.is_contested)

    async def ended() -> bool:
        await there.beat()
        return start.done()

    await eventually(ended)
    with pytest.raises(OtherFleet, match=r"queue 'q' have the tokenizer t \(so says w\), this one has other; .*drain"):
        await start
    assert await raw.keys("*worker:new*") == []
    assert await raw.hget(CARD, "tokenizer") == b"t"


async def test_the_card_of_a_fleet_that_died_keeps_nobody_away_for_long(raw: RedisClient, make: Make) -> None:
    await serving(make("i1", ttl_s=0.7))
    newcomer = await serving(make("i2", ttl_s=0.3, name="new", tokenizer="other"))
    assert newcomer.must_end is None
    assert await raw.hget(CARD, "tokenizer") == b"other"


async def test_who_was_frozen_does_not_come_back_to_a_fleet_of_other_tokens(raw: RedisClient, make: Make) -> None:
    frozen = await serving(make("i1"))
    await raw.delete(KEY, CARD, SERVING)  # they lapsed meanwhile
    there = await serving(make("i2", name="new", tokenizer="other"))
    assert await frozen.beat() > 0
    assert not await raw.exists(KEY)
    assert await raw.zrange(SERVING, 0, -1) == [b"new"]

    async def is_told() -> bool:
        await there.beat()
        await frozen.beat()
        return frozen.must_drain.is_set()

    await eventually(is_told)
    assert isinstance(frozen.must_end, OtherFleet)


async def test_who_was_frozen_comes_back_to_its_own_fleet(raw: RedisClient, make: Make) -> None:
    frozen, other = await serving(make("i1")), await serving(make("i2", name="other"))
    await raw.delete(KEY)
    await other.beat()
    assert await frozen.beat() == 0


async def test_who_may_join_whoever_serves_does(raw: RedisClient, make: Make) -> None:
    there = await serving(make("i1"))
    await serving(make("i2", name="new", tokenizer="other", allow_other_fleet=True))
    assert await raw.hget(CARD, "tokenizer") == b"t"
    await there.beat()
    assert there.must_end is None


async def test_of_two_that_join_at_once_one_does(raw: RedisClient, make: Make) -> None:
    """Neither serves yet."""
    first = await started(make("i1"))
    assert await make("i2", name="new", tokenizer="other").beat() > 0
    assert await first.beat() == 0


async def test_the_queue_is_on_the_list_while_it_is_served(raw: RedisClient, make: Make) -> None:
    heartbeat = await started(make("one"))
    assert not await raw.exists(keys.queues())
    heartbeat.set_serving(True)
    await heartbeat.beat()
    await eventually(lambda: _are_listed(raw, b"q"))
    await raw.zadd(keys.queues(), {"dead": 1})
    await heartbeat.beat()
    await eventually(lambda: _are_listed(raw, b"q"))
    assert 500_000 < await raw.pttl(keys.queues()) <= LONG_S * 1000
    other = await serving(make("two", name="other"))
    heartbeat.set_serving(False)
    await heartbeat.beat()
    await eventually(lambda: _are_listed(raw, b"q"))
    other.set_serving(False)
    await _beats_until(other, lambda: _are_listed(raw))
    other.set_serving(True)
    await _beats_until(other, lambda: _are_listed(raw, b"q"))
    await other.stop()
    assert not await raw.exists(keys.queues())


async def test_a_list_of_queues_that_hangs_costs_no_beat(
    raw: RedisClient, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the list may be on another node."""
    heartbeat, is_asked = await started(make("one")), asyncio.Event()

    async def hang(redis: RedisClient, command: Command) -> Any:
        if keys.queues() in command:
            is_asked.set()
            await asyncio.Event().wait()
        return await execute_one(redis, command)

    monkeypatch.setattr(heartbeats, "execute_one", hang)
    heartbeat.set_serving(True)
    async with asyncio.timeout(WAIT_S):
        assert await heartbeat.beat() == 0
        await is_asked.wait()
        assert await heartbeat.beat() == 0
        announcements = [task for task in asyncio.all_tasks() if task.get_name() == "announce"]
        assert len(announcements) == 1
        monkeypatch.undo()
        await heartbeat.stop()
    assert announcements[0].done()


async def test_a_list_of_queues_that_refuses_costs_no_beat(
    raw: RedisClient, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = await started(make("one"))

    async def refuse(redis: RedisClient, command: Command) -> Any:
        if keys.queues() in command:
            raise exceptions.ConnectionError("that node is gone")
        return await execute_one(redis, command)

    monkeypatch.setattr(heartbeats, "execute_one", refuse)
    heartbeat.set_serving(True)
    assert await heartbeat.beat() == 0
    (announcement,) = [task for task in asyncio.all_tasks() if task.get_name() == "announce"]
    await asyncio.wait_for(announcement, WAIT_S)
    monkeypatch.undo()
    await _beats_until(heartbeat, lambda: _are_listed(raw, b"q"))
    await heartbeat.stop()


async def _are_listed(raw: RedisClient, *queues: bytes) -> bool:
    return await raw.zrange(keys.queues(), 0, -1) == [*queues]


async def _beats_until(heartbeat: Heartbeat, condition: Callable[[], Awaitable[bool]]) -> None:
    async def has_come() -> bool:
        await heartbeat.beat()
        return await condition()

    await eventually(has_come)


async def _is_absent(raw: RedisClient, key: str) -> bool:
    return not await raw.exists(key)


async def _is_unserved(raw: RedisClient) -> bool:
    return not await raw.exists(SERVING)


async def test_one_look_frees_all_that_a_dead_worker_had(raw: RedisClient) -> None:
    stream, num_entries = keys.requests("q"), 2 * RETIRE_COUNT + 1
    await raw.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    async with raw.pipeline(transaction=False) as pipe:
        for i in range(num_entries):
            pipe.xadd(stream, {"prompt": i})
        await pipe.execute()
    await raw.xreadgroup(keys.GROUP, "dead", {stream: ">"}, count=num_entries)
    metrics = WorkerMetrics()
    await Reclaimer(raw, WorkerConfig(**{**QUICK, "name": "w"}), metrics, Readiness()).scan()
    consumers = await raw.xinfo_consumers(stream, keys.GROUP)
    assert {consumer["name"].decode(): consumer["pending"] for consumer in consumers} == {keys.WAITING: num_entries}
    assert (metrics.reclaimed._value.get(), metrics.lost_workers._value.get()) == (num_entries, 1)


@pytest.mark.parametrize("stream", [keys.requests("q"), keys.calls("q")], ids=["requests", "calls"])
@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe", b"\xed\xa0\x80", b"", b"a b\r\n", b"{x}", b"%s", b"x" * 100_000, b"unowned/\xff"],
    ids=lambda name: repr(name[:9]),
)
async def test_whatever_somebody_calls_a_consumer_what_it_has_is_freed(
    raw: RedisClient, name: bytes, stream: str
) -> None:
    await raw.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    await raw.xadd(stream, {"prompt": "x"})
    await raw.execute_command("XREADGROUP", "GROUP", keys.GROUP, name, "STREAMS", stream, ">")
    await Reclaimer(raw, WorkerConfig(**{**QUICK, "name": "w"}), WorkerMetrics(), Readiness()).scan()
    consumers = await raw.xinfo_consumers(stream, keys.GROUP)
    holder = keys.WAITING if stream == keys.requests("q") else keys.UNOWNED
    assert [(consumer["name"].decode(), consumer["pending"]) for consumer in consumers] == [(holder, 1)]


async def test_of_all_workers_one_looks_for_dead_ones_in_each_interval(raw: RedisClient) -> None:
    stream = keys.requests("q")
    await raw.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    for place in range(BEATS_PER_READ + 10):  # more than one read asks for
        await raw.xgroup_createconsumer(stream, keys.GROUP, f"live{place}")
        await raw.set(keys.heartbeat("q", f"live{place}"), "x")
    await raw.xadd(stream, {"prompt": "x"})
    await raw.xreadgroup(keys.GROUP, "dead", {stream: ">"})
    await raw.config_resetstat()
    metrics = WorkerMetrics()
    config = WorkerConfig(**{**QUICK, "reclaim_interval_s": 60.0})
    looks = [Reclaimer(raw, replace(config, name=f"w{place}"), metrics, Readiness()) for place in range(5)]
    await asyncio.gather(*(each.look(45.0) for each in looks))
    stats = await raw.info("commandstats")
    assert stats["cmdstat_xinfo|consumers"]["calls"] == 2  # requests and calls
    assert stats["cmdstat_mget"]["calls"] == 2
    assert metrics.reclaimed._value.get() == 1
    assert 0 < await raw.pttl(keys.looked("q")) <= 45_000
    await raw.delete(keys.looked("q"))
    await looks[0].look(45.0)
    stats = await raw.info("commandstats")
    assert stats["cmdstat_xinfo|consumers"]["calls"] == 4


async def _lapses_within(raw: RedisClient, most_ms: int) -> bool:
    return 0 < await raw.pttl(KEY) <= most_ms


async def _is_gone(raw: RedisClient) -> bool:
    return not await raw.exists(KEY)
