"""One engine on a virtual clock: the real scheduler and page pool, on a device that only takes time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.slack import StepClock, foretold_s
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.engine.stats import worth_trying
from penstock.tools.plan.step_times import StepShape, StepTiming
from penstock.tools.plan.traces import TracedRequest


@dataclass(slots=True)
class Served:
    """What became of one request, in seconds of the virtual clock."""

    request: TracedRequest
    number: int  # among all requests
    stamps_s: array[float] = field(default_factory=lambda: array("d"))  # when each token came
    num_cached: int = 0  # prompt tokens that the prefix cache saved

    @property
    def is_complete(self) -> bool:
        return len(self.stamps_s) == self.request.num_output

    @property
    def ttft_s(self) -> float:
        return self.stamps_s[0] - self.request.arrival_s


class _InFlight(NamedTuple):
    plan: StepPlan
    shape: StepShape
    end_s: float


class Replica:
    """Simulates `Engine.step` and the loop around it.

    A step is dispatched while the one before it runs, and planned as late as `StepClock` says; then the results of the
    step before are committed.

    A turn is two events, because other replicas' events may come in between: `begin` plans and dispatches, `commit` is
    when the results of the step before have become outputs.
    """

    def __init__(
        self, scheduler: Scheduler, pace: Pace, timing: StepTiming, max_num_seqs: int, *, takes_all: bool = False
    ) -> None:
        """With `takes_all`, every request waits in the engine; otherwise it takes what can run, as a worker does."""
        self.scheduler = scheduler
        self.now_s = 0.0
        self.busy_s = 0.0  # the device's computing time
        self.num_steps = 0  # the device's steps: a dispatch may hold several
        self.num_rows = 0  # sequences computed in all those steps together
        self.served: list[Served] = []
        self._pace, self._timing, self._max_num_seqs, self._takes_all = pace, timing, max_num_seqs, takes_all
        self._clock = StepClock(lambda: self.now_s)
        self._active: dict[Sequence, Served] = {}
        self._num_waiting = 0  # after the last step, as the driver knows it
        self._num_pages = 0
        self._in_flight: _InFlight | None = None
        self._ending: _InFlight | None = None  # the step whose results this turn waits for
        self._device_free_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request, by the rule of `EngineDriver.spare`."""
        free = self._max_num_seqs - len(self._active)
        return self._takes_all or worth_trying(self._num_waiting, self._num_pages, free) > 0

    def take(self, served: Served) -> None:
        request, number = served.request, served.number
        params = SamplingParams(max_tokens=request.max_tokens)
        sequence = Sequence(Request(str(number), request.prompt_ids(number), params), 0, number)
        self._active[sequence] = served
        self.served.append(served)
        self.scheduler.add(sequence)
        self._num_waiting += self._num_waiting > 0  # one at a time while another waits

    def begin(self, now_s: float) -> float:
        """Plans and dispatches a step. Returns when the outputs of the step before will be ready."""
        self.now_s = now_s
        self._clock.begin(is_idle=self._in_flight is None)
        plan = self.scheduler.plan(self._pace)
        self._ending, self._in_flight = self._in_flight, None
        if plan is not None:
            self._dispatch(plan)
        elif self._ending is None:
            raise AssertionError(f"{len(self._active)} requests are there, and none can be computed")
        if self._ending is not None:
            self.now_s = max(self.now_s, self._ending.end_s)
            self._clock.ended()
            self.now_s += self._timing.commit_s(self._ending.shape)
        return self.now_s

    def commit(self) -> float:
        """Turns the results into outputs. Returns when the next turn begins, unless a request comes first."""
        ending, self._ending = self._ending, None
        if ending is not None:
            for step in range(ending.shape.num_steps):
                self._commit_step(ending.plan, step)
            self._clock.committed()
        self._num_waiting = len(self.scheduler.waiting)
        self._num_pages = self.scheduler.num_available_pages
        return self.now_s + self._clock.slack_s()

    def _dispatch(self, plan: StepPlan) -> None:
        shape = StepShape.of(plan)
        self.now_s += self._timing.plan_s(shape)
        self._clock.dispatched(foretold_s(plan, self._pace))
        step_s = self._timing.step_s(shape)
        self._device_free_s = max(self.now_s, self._device_free_s) + step_s
        self._in_flight = _InFlight(plan, shape, self._device_free_s)
        self.busy_s += step_s
        self.num_steps += shape.num_steps
        self.num_rows += shape.num_steps * len(shape.chunks)

    def _commit_step(self, plan: StepPlan, step: int) -> None:
        for row in plan.rows:
            served = self._active.get(row.sequence)
            if served is None or step >= max(1, row.num_sampled):
                continue
            self.scheduler.commit(row, served.request.output_id(served.number) if row.num_sampled else None)
            if row.num_sampled:
                served.stamps_s.append(self.now_s)
            if served.is_complete:
                self.scheduler.finish(row.sequence)
                served.num_cached = row.sequence.num_cached
                del self._active[row.sequence]
