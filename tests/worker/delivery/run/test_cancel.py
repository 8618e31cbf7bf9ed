"""Requests end early because somebody cancelled them, or their time is up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.redis import pipeline
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.tasks import end_tasks
from penstock.serving.readiness import Readiness
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, Parked, Phase
from penstock.worker.watch import cancel
from penstock.worker.watch.cancel import CancelWatch
from tests.support.patience import WAIT_S, eventually
from tests.support.watched import watched
from tests.worker.delivery.delivery_lab import NOW_S, Bench, FixedClock, make_live


class Driver:
    """Records what it is to abort."""

    def __init__(self) -> None:
        self.aborted: list[tuple[str, str]] = []

    def abort(self, request_id: str, reason: str) -> None:
        self.aborted.append((request_id, reason))


class Watch:
    """A watch whose polls the test counts and may fail; it never really waits between them."""

    def __init__(self, redis: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redis = redis
        self.bench = Bench()
        self.driver = cast("Any", Driver())
        self.readiness = Readiness()
        self.asked: asyncio.Queue[list[str]] = asyncio.Queue()  # keys of each poll
        self.error: Exception | None = None
        self._send = pipeline.execute
        monkeypatch.setattr(cancel, "execute", self._execute)
        self.subject = CancelWatch(redis, self.bench.outbox, self.driver, self.readiness, poll_s=0.01)

    def add(self, request_id: str, phase: Phase, timeout_s: float | None = None) -> LiveRequest:
        live = make_live(request_id, is_restored=False)
        if phase >= Phase.RESTORED:
            live.resume([ChoiceBuffer(0)], timeout_s)
        if phase >= Phase.ADMITTED:
            live.admit(1)
        if phase >= Phase.RUNNING:
            live.start()
        if phase >= Phase.ENDED:
            live.end("stop")
        self.bench.requests.add(live)
        return live

    async def flag(self, *request_ids: str) -> None:
        for request_id in request_ids:
            await self.redis.set(keys.cancel("q", request_id), "1")

    async def polls(self, count: int = 2) -> list[list[str]]:
        """Waits for the next polls; before the second of them the first one is dealt with."""
        return [await self.asked.get() for _ in range(count)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.subject.run(), name="watch")
        async with watched(task), asyncio.timeout(WAIT_S):
            yield
        await end_tasks([task])

    async def _execute(self, redis: RedisClient, commands: list[Any]) -> list[Any]:
        self.asked.put_nowait([key for _, key in commands])
        if self.error is not None:
            raise self.error
        return await self._send(redis, commands)


@pytest.fixture
def watch(raw: RedisClient, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(raw, monkeypatch)


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, clock: FixedClock) -> FixedClock:
    monkeypatch.setattr(cancel, "time", clock)
    return clock


async def test_the_engine_ends_what_it_has_and_the_outbox_what_it_has_not(watch: Watch) -> None:
    running, waiting = watch.add("running", Phase.RUNNING), watch.add("waiting", Phase.ADMITTED)
    await watch.flag("running", "waiting")
    async with watch.running():
        await watch.polls()
    assert ("running", "cancelled") in watch.driver.aborted
    assert {request_id for request_id, _ in watch.driver.aborted} == {"running"}
    assert running.is_running  # until the engine says what it has
    assert (waiting.finish_reason, waiting.has_ended) == ("cancelled", True)
    assert watch.bench.outbox.due_s() == 0.0


async def test_only_what_runs_or_is_ready_to_is_asked_for(watch: Watch) -> None:
    """Until its journal is read, nobody knows what its end would say; one that has ended keeps its end."""
    for phase in Phase:
        if phase < Phase.GONE:
            watch.add(phase.name, phase)
        await watch.flag(phase.name)
    async with watch.running():
        (asked,) = await watch.polls(1)
    assert asked == [keys.cancel("q", name) for name in ("RESTORED", "ADMITTED", "RUNNING")]
    assert watch.bench.requests.get("CLAIMED").phase is Phase.CLAIMED  # type: ignore[union-attr]
    assert watch.bench.requests.get("ENDED").finish_reason == "stop"  # type: ignore[union-attr]


async def test_others_are_left_alone(watch: Watch) -> None:
    other = watch.add("other", Phase.RUNNING)
    async with watch.running():
        await watch.polls()
    assert (watch.driver.aborted, other.phase) == ([], Phase.RUNNING)


async def test_what_is_overdue_ends_once(watch: Watch, stopped: FixedClock) -> None:
    waiting = watch.add("waiting", Phase.ADMITTED, timeout_s=1.0)
    watch.add("running", Phase.RUNNING, timeout_s=1.0)
    later = watch.add("later", Phase.ADMITTED, timeout_s=1000.0)
    stopped.now_s += 0.5
    async with watch.running():
        await watch.polls(3)
    assert waiting.finish_reason == "expired"
    assert watch.driver.aborted == [("running", "expired")]
    assert later.phase is Phase.ADMITTED


@pytest.mark.parametrize(
    ("timeout_s", "wait_s"),
    [(None, 60.0), (1000.0, 60.0), (10.5, 10.0), (0.5, 0.01)],  # half a second went by before the claim
)
def test_it_waits_for_the_next_poll_or_the_first_deadline(watch: Watch, timeout_s: float | None, wait_s: float) -> None:
    subject = CancelWatch(watch.redis, watch.bench.outbox, watch.driver, watch.readiness, poll_s=60.0)
    watch.add("r", Phase.RUNNING, timeout_s)
    assert subject._seconds_until_next(NOW_S) == wait_s


@pytest.mark.parametrize("phase", [Phase.CLAIMED, Phase.ENDED])
def test_what_it_would_not_end_does_not_hurry_it(watch: Watch, phase: Phase) -> None:
    """While Redis takes no end, polls would follow each other without a pause."""
    subject = CancelWatch(watch.redis, watch.bench.outbox, watch.driver, watch.readiness, poll_s=60.0)
    watch.add("r", phase, timeout_s=0.5)
    assert subject._seconds_until_next(NOW_S) == 60.0


async def test_looks_follow_each_other_while_they_find_somebody(watch: Watch) -> None:
    """Cancelled requests keep others from their turn until they are found."""
    subject = CancelWatch(watch.redis, watch.bench.outbox, watch.driver, watch.readiness, poll_s=60.0)
    watch.add("stays", Phase.RUNNING)
    watch.add("goes", Phase.ADMITTED)
    await watch.flag("goes")
    pauses = []
    for _ in range(2):
        await subject._poll()
        pauses.append(subject._seconds_until_next(NOW_S))
    assert pauses == [7.5, 60.0]


async def test_a_deadline_waits_for_no_answer(
    watch: Watch, stopped: FixedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis holds its answer about the flags back."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def held(*_: Any) -> list[Any]:
        asked.set()
        await answered.wait()
        return [0]

    monkeypatch.setattr(cancel, "execute", held)
    live = watch.add("r", Phase.ADMITTED, timeout_s=1.0)
    async with watch.running():
        await asked.wait()
        stopped.now_s += 1.0
        await eventually(lambda: live.finish_reason == "expired")
        assert not answered.is_set()
        answered.set()


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_suspect_that_need_not_run_is_claimed_to_be_ended(watch: Watch, stopped: FixedClock, why: str) -> None:
    entry, requests = QueueEntry("7-7", {b"prompt": b"x"}, 7), watch.bench.requests
    stays = replace(entry, id="8-8")
    async with watch.running():
        requests.must_recover = False
        requests.park(Parked("q", "s", entry, 0, deadline_s=NOW_S + 1, due_s=NOW_S + 9))
        requests.park(Parked("q", "stays", stays, 0, deadline_s=None, due_s=NOW_S + 9))
        if why == "cancelled":
            await watch.flag("s")
        else:
            stopped.now_s += 1
        await eventually(lambda: requests.must_recover)
    assert requests.parked.keys() == {"8-8"}


async def test_nothing_is_asked_while_nothing_is_there(watch: Watch) -> None:
    async with watch.running():
        await watch.redis.ping()
        assert watch.asked.empty()
        watch.add("r", Phase.RUNNING)
        assert await watch.polls(1) == [[keys.cancel("q", "r")]]


async def test_trouble_with_redis_makes_it_unready_until_a_poll_succeeds(watch: Watch) -> None:
    watch.add("r", Phase.RUNNING)
    await watch.flag("r")
    watch.error = exceptions.ConnectionError("gone")
    async with watch.running():
        await watch.polls()
        assert "cancel" in watch.readiness.reasons
        assert watch.driver.aborted == []
        watch.error = None
        async with asyncio.timeout(WAIT_S):
            while not watch.readiness.is_ready:
                await watch.polls()
    assert ("r", "cancelled") in watch.driver.aborted


@pytest.mark.parametrize(
    "error", [exceptions.NoPermissionError("NOPERM"), exceptions.ResponseError("ERR odd")], ids=str
)
async def test_what_the_server_refuses_is_told_and_asked_again(watch: Watch, error: Exception) -> None:
    live = watch.add("r", Phase.RUNNING)
    await watch.flag("r")
    watch.error = error
    async with watch.running():
        await watch.polls()
        was_ready, watch.error = watch.readiness.is_ready, None
        await watch.polls()
    assert (was_ready, watch.readiness.is_ready) == (False, True)
    assert (live.id, "cancelled") in watch.driver.aborted


async def test_a_flag_that_cannot_be_read_is_told(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.Event()

    async def answers(*_: Any) -> list[Any]:
        if not watch.readiness.is_ready:
            told.set()
        return [exceptions.ResponseError("ERR odd")]

    monkeypatch.setattr(cancel, "execute", answers)
    watch.add("r", Phase.RUNNING)
    async with watch.running():
        await told.wait()
