"""How long the next plan can wait for requests while the device is still at work on the step before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.step_plan import StepPlan

_MARGIN_S = 0.5e-3  # a thread that sleeps wakes up late
_WAIT_S = 0.2e-3  # reading results that are there takes no longer
_FADE = 0.98  # per step: a rare long or short one is forgotten after a hundred
_RETREAT = 0.8  # of what was trusted, after the device had nothing to do
_NEWEST = 0.1  # the weight of the newest step among those before it


def foretold_s(plan: StepPlan, pace: Pace) -> float | None:
    """How long a plan will take; None if steps were not measured."""
    num_pairs = sum(row.num_tokens * row.start for row in plan.rows)
    step_s = pace.foretold_s(plan.num_tokens, len(plan.sampled), num_pairs)
    return None if step_s is None else plan.num_steps * step_s


class StepClock:
    """Foretells the end of the step that the device is at.

    A step is planned while the one before it runs, so a request that comes meanwhile would wait for both. It waits for
    one if the plan is made shortly before the device needs it. What warm-up measured says when that is, and how long
    steps really take corrects it; where the device had run out of work, the next plans are made earlier.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._trust = 1.0  # the part of the foretold time that steps of late took at least; never more than all of it
        self._host_s = 0.0  # that planning and dispatching took of late, at most
        self._turn_s = 0.0  # that the host worked for a step, usually
        self._ended_s = 0.0
        self._commit_s = 0.0  # that results of the last step took
        self._begun_s = 0.0  # when the host turned to the newest step
        self._dispatched_s = 0.0
        self._foretold_s: deque[float | None] = deque()  # of the steps that the device has, in order; None: unknown
        self._start_s = 0.0  # when it began with the first of them

    def begin(self, *, is_idle: bool) -> None:
        """The host turns to planning. `is_idle`: the device has nothing."""
        self._begun_s = self._now_s()
        if is_idle:
            self._foretold_s.clear()

    def dispatched(self, foretold_s: float | None) -> None:
        """The device has one more step. None: nobody knows how long it takes, or the host waited meanwhile."""
        self._dispatched_s = self._now_s()
        if foretold_s is not None:
            plan_s = self._dispatched_s - self._begun_s
            self._host_s = max(plan_s, self._host_s * _FADE)
            turn_s = plan_s + self._commit_s
            self._turn_s += _NEWEST * (turn_s - self._turn_s) if self._turn_s else turn_s
        if not self._foretold_s:
            self._start_s = self._dispatched_s
        self._foretold_s.append(foretold_s)

    def ended(self) -> None:
        """The device is through with its first step: the host waited for the results."""
        now_s = self._now_s()
        foretold_s = self._foretold_s.popleft()
        if foretold_s and self._foretold_s and self._foretold_s[-1] is not None:  # it was no grammar that waited
            if now_s - self._dispatched_s < _WAIT_S:
                self._trust *= _RETREAT
            else:
                self._trust = min(1.0, (now_s - self._start_s) / foretold_s, self._trust / _FADE)
        self._start_s = self._ended_s = now_s

    def committed(self) -> None:
        """The host is through with the results of the step that ended."""
        self._commit_s = self._now_s() - self._ended_s

    @property
    def turn_s(self) -> float:
        """Seconds that the host works for a step, from its plan to its outputs: so long the device waits where a step
        is planned by the results of the one before it.
        """
        return self._turn_s

    def slack_s(self) -> float:
        """Seconds until the next step has to be planned; 0 where that is now, or nothing runs."""
        if not self._foretold_s or self._foretold_s[0] is None:
            return 0.0
        end_s = self._start_s + self._trust * self._foretold_s[0]
        return max(0.0, end_s - self._host_s - _MARGIN_S - self._now_s())
