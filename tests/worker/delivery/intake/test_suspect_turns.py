"""Suspects run alone, one after the other, with a clock and an idle engine that the test sets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.engine.driver import EngineDriver
from penstock.engine.request import FinishReason
from penstock.protocol.wire import GenerateRequest
from penstock.worker.intake import suspects
from penstock.worker.intake.handing_back import HandingBack
from penstock.worker.intake.suspects import Suspects
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, Parked, RequestTable
from tests.support.patience import WAIT_S
from tests.worker.delivery.delivery_lab import FixedClock, make_live

WAITS_S = 10.0


class Desk:
    """The part of a worker that suspects look at."""

    def __init__(self, *, wait_s: float = WAITS_S) -> None:
        self.is_idle = False
        self.num_ways = 0
        self.requests = RequestTable(lambda _: None)
        driver, handing_back = cast("EngineDriver", self), cast("HandingBack", self)
        self.suspects = Suspects(self.requests, driver, handing_back, wait_s=wait_s)

    async def make_way(self) -> None:
        self.num_ways += 1

    def park(self, request_id: str, **asked: Any) -> LiveRequest:
        live = make_live(request_id, entry_id=f"{request_id}-0", asked=GenerateRequest(prompt="x", **asked))
        self.suspects.park(live, QueueEntry(live.entry_id, {}, 0))
        return live

    def next(self) -> str | None:
        return None if self.suspects.next is None else self.suspects.next.id

    def runs(self, live: LiveRequest, reason: FinishReason | None) -> None:
        """Runs a suspect alone, until its end or until the server is in trouble."""
        self.requests.parked.pop(live.entry_id, None)
        if reason is not None:
            live.end(reason)
        self.suspects.note_run(live)


@pytest.fixture(autouse=True)
def clock(clock: FixedClock, monkeypatch: pytest.MonkeyPatch) -> FixedClock:
    monkeypatch.setattr(suspects, "time", clock)
    return clock


async def test_it_runs_at_a_quiet_moment_or_after_a_set_time(clock: FixedClock) -> None:
    desk = Desk()
    assert desk.next() is None
    desk.park("1")
    assert desk.next() is None
    desk.is_idle = True
    assert desk.next() == "1"
    desk.requests.taking.add("9-0")  # something is on its way to the engine
    assert desk.next() is None
    desk.requests.taking.clear()
    desk.is_idle = False
    clock.now_s += WAITS_S - 0.01
    assert desk.next() is None
    clock.now_s += 0.02
    assert desk.next() == "1"


async def test_the_highest_priority_is_next_and_of_those_the_first(clock: FixedClock) -> None:
    desk = Desk()
    for request_id, priority in (("1", -5), ("2", 7), ("3", 7)):
        desk.park(request_id, priority=priority)
    clock.now_s += WAITS_S
    assert desk.next() == "2"


async def test_one_whose_time_is_over_goes_before_higher_ones_that_may_wait(clock: FixedClock) -> None:
    desk = Desk()
    desk.park("1", priority=-5)
    clock.now_s += WAITS_S / 2
    desk.park("2", priority=7)
    was_due = desk.suspects.is_due
    clock.now_s += WAITS_S / 2
    assert (was_due, desk.suspects.is_due) == (False, True)
    assert desk.next() == "1"
    clock.now_s += WAITS_S / 2
    assert desk.next() == "2"


async def test_others_make_way_once_for_each_that_has_not_ended(clock: FixedClock) -> None:
    desk = Desk()
    live = desk.park("1")

    def parked() -> Parked:
        return desk.requests.parked[live.entry_id]

    for _ in range(2):
        await desk.suspects.make_way(parked())
    desk.runs(live, None)
    live = desk.park("1")
    await desk.suspects.make_way(parked())
    assert desk.num_ways == 1
    desk.runs(live, "stop")
    live = desk.park("1")
    desk.is_idle = True
    await desk.suspects.make_way(parked())  # nobody is in its way
    assert desk.num_ways == 1
    desk.is_idle = False
    await desk.suspects.make_way(parked())
    assert desk.num_ways == 2


async def test_its_deadline_goes_on_while_it_is_parked() -> None:
    desk = Desk()
    live, other = desk.park("1", timeout_s=30), desk.park("2")
    assert desk.requests.parked[live.entry_id].deadline_s == live.deadline_of(30)
    assert desk.requests.parked[other.entry_id].deadline_s is None


async def test_whoever_waits_is_woken_when_its_time_has_come() -> None:
    desk = Desk(wait_s=0.01)
    desk.park("1")
    async with asyncio.timeout(WAIT_S):
        await desk.requests.changed.wait()
