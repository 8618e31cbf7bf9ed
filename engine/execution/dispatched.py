"""A step between its dispatch and its commit."""

from __future__ import annotations

from penstock.engine.execution.logprobs import Logprobs
from penstock.engine.execution.runner import InFlight
from penstock.engine.scheduling.scheduler import StepPlan
from penstock.engine.scheduling.sequence import Sequence


class StepFailed(Exception):
    """A step raised, when it was dispatched or when its results were read; the cause is what it raised."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(f"a step of {len(plan.rows)} sequences")
        self.plan = plan


class Dispatched:
    """A step on its way. However often its results are read, they are the same, and one that failed stays failed."""

    def __init__(self, plan: StepPlan, in_flight: InFlight) -> None:
        self.plan = plan
        self._in_flight = in_flight
        self._results: tuple[list[list[int]], list[Logprobs] | None] | Exception | None = None

    def results(self) -> tuple[list[list[int]], list[Logprobs] | None]:
        """Waits for the step: its tokens and log-probabilities, as `InFlight` has them."""
        if self._results is None:
            try:
                self._results = self._in_flight.token_ids(), self._in_flight.logprobs()
            except Exception as error:
                self._results = error
        if isinstance(self._results, Exception):
            raise StepFailed(self.plan) from self._results
        return self._results

    def newest(self) -> dict[Sequence, int]:
        """The token of each sequence that a grammar constrains. A step with one that samples is no loop of steps."""
        token_ids, _ = self.results()
        rows = self.plan.places()
        return {
            row.sequence: token_ids[0][place] for row, place in rows if row.num_sampled and row.sequence.is_constrained
        }
