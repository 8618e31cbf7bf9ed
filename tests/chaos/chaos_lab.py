"""Runs small plans, made by hand, with the harness of `penstock chaos`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.local.embedded import EmbeddedServer
from penstock.tools.chaos.checker import Problem, Verdict, check
from penstock.tools.chaos.history import EventKind, History
from penstock.tools.chaos.plan import ChaosOptions, FaultPlan, RequestPlan
from penstock.tools.chaos.run import Tempo, fake_truths, run_plan, worker_setup
from penstock.tools.chaos.site import Site

QUICK = Tempo(heartbeat_ttl_s=0.5, reclaim_interval_s=0.1, block_ms=100)


@dataclass
class Result:
    """A run that is over."""

    history: History
    verdict: Verdict

    def owners(self, request_id: str) -> list[str]:
        """Returns the workers that owned a request, in order. The request ran again under a longer name where a busy
        machine left no moment for the fault; the last run counts.
        """
        request_id = [name for name in self.history.records if name.startswith(request_id)][-1]
        return [entry.fields["worker"] for entry in self.history.records[request_id].seen if is_own(entry.fields)]

    def heirs(self, kind: EventKind) -> list[str]:
        """Returns the workers that owned the victim after the last worker that had such an event; none if that one
        never had it.
        """
        worker = [event.worker for event in self.history.events if event.kind == kind][-1]
        owners = self.owners("victim")
        return owners[owners.index(worker) + 1 :] if worker in owners else []

    @property
    def problems(self) -> list[Problem]:
        return wrongs(self.verdict)

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.history.events)


def wrongs(verdict: Verdict) -> list[Problem]:
    """Returns what must not happen on any machine. How long a takeover lasts is for `penstock chaos` on a quiet one."""
    return [problem for problem in verdict.problems if problem.fault != "late"]


def is_own(fields: dict[str, str]) -> bool:
    return fields["type"] == "own"


async def run_requests(server: EmbeddedServer, logs: Path, *requests: RequestPlan, workers: int = 2) -> Result:
    plan = FaultPlan(ChaosOptions(seed=0, requests=100, workers=workers), requests)
    setup = worker_setup(plan.options, QUICK, model="", logs=logs)
    history = await run_plan(plan, Site(server), setup, progress=lambda *_: None)
    return Result(history, check(history, fake_truths(history), recovery_limit_s=QUICK.recovery_limit_s))
