"""Sweeps while the server is in trouble, or another process has the name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from redis import exceptions

from penstock.protocol.tasks import end_tasks
from penstock.serving.readiness import Readiness
from penstock.worker.intake.intake import Intake
from penstock.worker.watch import sweeping
from penstock.worker.watch.sweeping import sweep_forever
from tests.support.patience import WAIT_S
from tests.support.watched import watched
from tests.worker.delivery.delivery_lab import Bench

LOST = exceptions.ConnectionError("the answer is lost")


class Entries:
    """A server that has nothing to sweep; the test says what else it answers."""

    def __init__(self) -> None:
        self.answers: list[Exception | bool] = []  # an error, or whether there is more; then no more
        self.num_sweeps = 0
        self.swept = asyncio.Event()

    async def sweep(self) -> Any:
        self.num_sweeps += 1
        self.swept.set()
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(entries=[], has_more=answer)


class Desk:
    """An intake that only sweeps."""

    def __init__(self) -> None:
        self.outbox = Bench().outbox
        self.requests = self.outbox.requests
        self.requests.must_recover = False
        self.entries, self.heartbeat = Entries(), SimpleNamespace(is_contested=False)
        self.readiness = Readiness()
        stand_ins: dict[str, Any] = {"entries": self.entries, "heartbeat": self.heartbeat, "outbox": self.outbox}
        stand_ins["driver"] = SimpleNamespace(watch_capacity=lambda _: None)
        unused = ("claimer", "restorer", "handing_back", "suspects")
        self.intake = Intake(**stand_ins, **dict.fromkeys(unused), readiness=self.readiness)  # type: ignore[arg-type]


@pytest.mark.parametrize("answers", [[LOST], [True, LOST]], ids=["at once", "behind others"])
async def test_after_a_failed_sweep_what_it_took_is_looked_for(answers: list[Any]) -> None:
    desk = Desk()
    desk.entries.answers = answers
    with pytest.raises(exceptions.ConnectionError):
        await desk.intake.sweep()
    assert desk.requests.must_recover


async def test_it_goes_on_while_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.entries.answers = [True, True, False]
    await desk.intake.sweep()
    assert desk.entries.num_sweeps == 3
    assert not desk.requests.must_recover


@pytest.mark.parametrize("why", ["another process has the name", "the worker stops"])
async def test_nothing_is_swept_where(why: str) -> None:
    desk = Desk()
    if why == "the worker stops":
        desk.intake.stop()
    else:
        desk.heartbeat.is_contested = True
    await desk.intake.sweep()
    assert desk.entries.num_sweeps == 0


async def test_a_failed_sweep_is_told_and_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEEP_INTERVAL_S", 0.001)
    desk = Desk()
    desk.entries.answers = [LOST]
    task = asyncio.create_task(sweep_forever(desk.intake, desk.readiness), name="sweeper")
    async with watched(task), asyncio.timeout(WAIT_S):
        await desk.entries.swept.wait()
        assert "sweeper" in desk.readiness.reasons
        while "sweeper" in desk.readiness.reasons:
            desk.entries.swept.clear()
            await desk.entries.swept.wait()
    assert desk.entries.num_sweeps >= 2
    await end_tasks([task])
