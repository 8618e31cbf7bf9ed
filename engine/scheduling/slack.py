"""How long the next plan can wait for requests while the device is still busy with the step before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.step_plan import StepPlan

_MARGIN_S = 0.5e-3  # sleeping threads wake up late
_WAIT_S = 0.2e-3  # reading finished results takes no longer
_FADE = 0.98  # per step: an outlier is forgotten after about a hundred
_RETREAT = 0.8  # factor on the trust after the device ran idle
_NEWEST = 0.1  # weight of the newest step in the running mean


def foretold_s(plan: StepPlan, pace: Pace) -> float | None:
    """Returns the expected seconds of a plan, or None if steps were not measured."""
    num_pairs = sum(row.num_tokens * row.start for row in plan.rows)
    step_s = pace.foretold_s(plan.num_tokens, len(plan.sampled), num_pairs)
    return None if step_s is None else plan.num_steps * step_s


class StepClock:
    """Predicts the end of the step that the device is running.

    A step is planned while the one before it runs, so a request that comes after planning would wait for both. If the
    plan is made just before the device needs it, the request waits for one only. The times measured at warm-up say when
    that is, and the real step times correct them. After the device has run idle, the next plans are made earlier.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._trust = 1.0  # least share of the predicted time that recent steps took; at most 1
        self._host_s = 0.0  # most that planning and dispatching took recently
        self._turn_s = 0.0  # the host's usual work for a step
        self._ended_s = 0.0
        self._commit_s = 0.0  # time to process the last step's results
        self._begun_s = 0.0  # when the host began the newest step
        self._dispatched_s = 0.0
        self._foretold_s: deque[float | None] = deque()  # of the steps queued on the device, in order; None: unknown
        self._start_s = 0.0  # when the device began the first of them

    def begin(self, *, is_idle: bool) -> None:
        """Notes that the host begins planning. `is_idle`: the device has nothing to do."""
        self._begun_s = self._now_s()
        if is_idle:
            self._foretold_s.clear()

    def dispatched(self, foretold_s: float | None) -> None:
        """Notes that the device has one more step. None: its duration is unknown, or the host waited meanwhile."""
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
        """Notes that the device has finished the first of its queued steps, for whose results the host waited."""
        now_s = self._now_s()
        foretold_s = self._foretold_s.popleft()
        if foretold_s and self._foretold_s and self._foretold_s[-1] is not None:  # the wait was not for a grammar
            if now_s - self._dispatched_s < _WAIT_S:
                self._trust *= _RETREAT
            else:
                self._trust = min(1.0, (now_s - self._start_s) / foretold_s, self._trust / _FADE)
        self._start_s = self._ended_s = now_s

    def committed(self) -> None:
        """Notes that the host has processed the results of the step that ended."""
        self._commit_s = self._now_s() - self._ended_s

    @property
    def turn_s(self) -> float:
        """Seconds that the host works for a step, from its plan to its outputs.

        If a step's plan depends on the results of the one before it, the device is idle for this time.
        """
        return self._turn_s

    def slack_s(self) -> float:
        """Returns the seconds until the next step has to be planned; 0 if that is now, or nothing runs."""
        if not self._foretold_s or self._foretold_s[0] is None:
            return 0.0
        end_s = self._start_s + self._trust * self._foretold_s[0]
        return max(0.0, end_s - self._host_s - _MARGIN_S - self._now_s())
