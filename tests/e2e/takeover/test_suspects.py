"""Requests that were running at two crashes in a row run alone, and nothing waits for them longer than it must."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.request import Request
from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import FakeEngine, expected_tokens
from penstock.worker.intake import suspects
from tests.e2e.takeover.waiting_scenes import Blocked, SlowText
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send

LONG_S = 1000.0


class Company(FakeEngine):
    """Records which requests it had at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[set[str]] = []

    def enqueue(self, request: Request) -> None:
        super().enqueue(request)
        self.seen.append({row.request.id for row in self._rows if row.ended is None})

    def had_alone(self, *request_ids: str) -> bool:
        return all(ids == {each} for each in request_ids for ids in self.seen if each in ids)


async def send_suspect(redis: RedisClient, request_id: str, **fields: Any) -> None:
    """Sends a request that one worker died with, and that a second one will have died with when it is claimed."""
    died = {"status": "running", "instance": "gone", "epoch": 1, "crashes": 1, "strikes": 1}
    await redis.hset(keys.state("q", request_id), mapping=died)  # type: ignore[arg-type]
    await send(redis, id=request_id, **{"prompt": request_id, "max_tokens": 3, **fields})


async def parked(redis: RedisClient, *request_ids: str) -> None:
    for request_id in request_ids:
        await eventually(lambda: _is_parked(redis, request_id))  # noqa: B023


async def _is_parked(redis: RedisClient, request_id: str) -> bool:
    return bool(await redis.hmget(keys.state("q", request_id), "status", "strikes") == ["queued", "2"])


async def running(redis: RedisClient, engine: FakeEngine, **fields: Any) -> None:
    await send(redis, prompt=fields["id"], **fields)
    await eventually(lambda: fields["id"] in engine.prefilled)


async def test_others_are_taken_and_run_while_a_suspect_waits(redis_url: str, redis: RedisClient) -> None:
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S):
        await running(redis, engine, id="a", max_tokens=5)
        await send_suspect(redis, "s", priority=5)
        await parked(redis, "s")
        await running(redis, engine, id="urgent", max_tokens=5, priority=1000)
        await running(redis, engine, id="usual", max_tokens=5)
        assert "s" not in engine.prefilled
        engine.allow()
        for request_id in ("a", "urgent", "usual", "s"):
            assert (await read_reply(redis, request_id)).end.finish_reason == "length"
        await eventually(lambda: is_queue_empty(redis))
    assert engine.prefilled[-1] == "s"
    assert engine.had_alone("s")


async def test_nothing_is_started_beside_it_and_what_need_not_run_ends(redis_url: str, redis: RedisClient) -> None:
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S), AsyncClient(redis_url, queue="q") as client:
        await send_suspect(redis, "s")
        await eventually(lambda: engine.prefilled == ["s"])
        handle = await client.submit("x", priority=1000)
        await handle.cancel()
        await send(redis, id="urgent", prompt="x", priority=1000, max_tokens=3)
        await send(redis, id="late", prompt="x", priority=1000, timeout_s=0.01)
        assert (await read_reply(redis, handle.id)).end.finish_reason == "cancelled"
        assert (await read_reply(redis, "late")).end.finish_reason == "expired"
        assert engine.prefilled == ["s"]
        engine.allow()
        await read_reply(redis, "urgent")
    assert engine.had_alone("s")


async def test_what_is_found_pending_here_meanwhile_waits_again(redis_url: str, redis: RedisClient) -> None:
    """An answer to a read was lost, in trouble with Redis."""
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, name="w", suspect_wait_s=LONG_S) as worker:
        await send_suspect(redis, "s")
        await eventually(lambda: engine.prefilled == ["s"])
        stream, entry = keys.requests("q"), await send(redis, id="found", prompt="x", max_tokens=3)
        await eventually(lambda: _holder(redis, entry, keys.WAITING))
        await redis.xclaim(stream, keys.GROUP, "w", 0, [entry], justid=True)
        worker.service._session.requests.recover()  # type: ignore[union-attr]
        await eventually(lambda: _holder(redis, entry, keys.WAITING))
        assert await redis.hget(keys.state("q", "found"), "status") == "queued"
        engine.allow()
        await read_reply(redis, "found")
    assert engine.had_alone("s")


async def _holder(redis: RedisClient, entry: str, consumer: str) -> bool:
    return bool(await redis.xpending_range(keys.requests("q"), keys.GROUP, entry, entry, 1, consumer))


async def test_what_is_being_prepared_gives_way_too(redis_url: str, redis: RedisClient) -> None:
    blocked, engine = Blocked(), Company(max_num_seqs=4)
    async with running_worker(redis_url, engine, SlowText(blocked), suspect_wait_s=0.1):
        await send(redis, id="slow", messages='[{"role": "user", "content": "x"}]', max_tokens=3)
        await eventually(lambda: blocked.num_begun)
        await send_suspect(redis, "s")
        assert (await read_reply(redis, "s")).end.finish_reason == "length"
        assert await redis.hmget(keys.state("q", "slow"), "handbacks", "crashes") == ["0", None]
        blocked.may_go_on.set()
        assert (await read_reply(redis, "slow")).end.finish_reason == "length"
    assert engine.had_alone("s")


async def test_after_its_time_what_runs_gives_way_once(redis_url: str, redis: RedisClient) -> None:
    """A request of any priority gives way; that is not a hand-back, and it goes on where it was."""
    engine = Company(max_num_seqs=4, step_s=0.002)
    async with running_worker(redis_url, engine, suspect_wait_s=0.2) as worker:
        for name, priority in (("high", 1000), ("low", -5)):
            await running(redis, engine, id=name, max_tokens=600, priority=priority)
            await read_until(redis, name, lambda entry: entry.type == "chunk")
        await send_suspect(redis, "s", priority=-1000, max_tokens=200)
        assert (await read_reply(redis, "s")).tokens() == expected_tokens(b"s", "s", 0, 200)
        for name in ("high", "low"):
            assert await redis.hmget(keys.state("q", name), "handbacks", "crashes") == ["0", None]
            assert (await read_reply(redis, name)).tokens() == expected_tokens(name.encode(), name, 0, 600)
        assert worker.service.metrics.handed_back._value.get() == 2
        await eventually(lambda: is_queue_empty(redis))
    assert engine.had_alone("s")
    assert engine.prefilled.index("s") == 2


async def test_it_may_do_what_it_does_to_the_worker_and_no_other_pays(redis_url: str, redis: RedisClient) -> None:
    engine = Company(max_num_seqs=4, step_s=0.002)
    async with running_worker(redis_url, engine, suspect_wait_s=0.05) as victim:
        for name in ("a", "b"):
            await running(redis, engine, id=name, max_tokens=300)
        await send_suspect(redis, "s", prompt="s\0")
        await eventually(victim.task.done)
        assert "request s is poison" in str(victim.task.exception())
    for name in ("a", "b"):
        assert await redis.hmget(keys.state("q", name), "crashes", "strikes") == [None, None]
    async with running_worker(redis_url):
        assert (await read_reply(redis, "s")).end.code == "too_many_crashes"
        for name in ("a", "b"):
            assert (await read_reply(redis, name)).tokens() == expected_tokens(name.encode(), name, 0, 300)


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_it_ends_while_it_waits(redis_url: str, redis: RedisClient, why: str) -> None:
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S):
        await running(redis, engine, id="a", max_tokens=5)
        await send_suspect(redis, "s", **({"timeout_s": 0.5} if why == "expired" else {}))
        await send_suspect(redis, "stays")
        await parked(redis, "stays")
        if why == "cancelled":
            await redis.set(keys.cancel("q", "s"), 1)
        assert (await read_reply(redis, "s")).end.finish_reason == why
        assert engine.prefilled == ["a"]
        engine.allow()
        assert (await read_reply(redis, "stays")).end.finish_reason == "length"


async def test_several_go_by_priority_and_others_come_between(redis_url: str, redis: RedisClient) -> None:
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S):
        await running(redis, engine, id="a", max_tokens=5)
        for name, priority in (("low", -5), ("high", 7)):
            await send_suspect(redis, name, priority=priority)
        await parked(redis, "low", "high")
        engine.allow(5)  # all of the first one
        await eventually(lambda: "high" in engine.prefilled)
        await send(redis, id="between", prompt="x", priority=-100, max_tokens=3)
        engine.allow()
        for request_id in ("a", "low", "high", "between"):
            await read_reply(redis, request_id)
    assert engine.prefilled == ["a", "high", "between", "low"]
    assert engine.had_alone("low", "high")


async def test_of_several_none_waits_anew_when_another_has_run(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, names = Company(max_num_seqs=4), ("s", "t", "u")
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S) as worker:
        await running(redis, engine, id="a", max_tokens=50)
        for name in names:
            await send_suspect(redis, name)
            await parked(redis, name)  # in this order
        requests = worker.service._session.requests  # type: ignore[union-attr]
        await eventually(lambda: len(requests.parked) == len(names))
        monkeypatch.setattr(suspects, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + LONG_S))
        requests.changed.fire()
        await eventually(lambda: len(engine.prefilled) == 2)
        engine.allow()
        for name in ("a", *names):
            assert (await read_reply(redis, name)).end.finish_reason == "length"
    assert engine.prefilled == ["a", *names, "a"]
    assert engine.had_alone(*names)


async def test_a_drain_gives_those_back_that_wait(redis_url: str, redis: RedisClient) -> None:
    engine = Company(max_num_seqs=4)
    engine.hold()
    async with running_worker(redis_url, engine, suspect_wait_s=LONG_S, drain_timeout_s=0.01) as first:
        await running(redis, engine, id="a", max_tokens=5)
        await send_suspect(redis, "s")
        await parked(redis, "s")
        await first.drain()
    second = Company()
    async with running_worker(redis_url, second, suspect_wait_s=LONG_S):
        for name in ("a", "s"):
            assert (await read_reply(redis, name)).tokens() == expected_tokens(
                name.encode(), name, 0, 5 if name == "a" else 3
            )
    assert second.had_alone("s")
    assert await redis.hget(keys.state("q", "s"), "strikes") == "2"
