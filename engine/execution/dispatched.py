"""A step between its dispatch and its commit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

from penstock.engine.execution.logprobs import Logprobs
from penstock.engine.execution.runner import InFlight
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan


class StepFailed(Exception):
    """A step raised, when it was dispatched or when its results were read; the cause is what it raised."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(f"a step of {len(plan.rows)} sequences")
        self.plan = plan


class Drawn(NamedTuple):
    """What a row got in one step."""

    row: Row
    token_ids: Rows[int]  # each is behind the one before; no token is below 0, which is the last then
    place: int  # of the first of them, in `logprobs`; those that score are before it
    logprobs: Logprobs | None


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

    def drawn(self) -> Iterator[Drawn]:
        """Waits for the step: what it means for each row, step by step if it is several. A row may take part in the
        first of them only: what is there for it after that means nothing.
        """
        token_ids, logprobs = self.results()
        for step, sampled in enumerate(token_ids):
            found = None if logprobs is None else logprobs[step]
            for row, place in self.plan.places():
                if step < max(1, row.num_sampled):
                    yield Drawn(row, _drawn_by(row, sampled, place), place, found)

    def newest(self) -> dict[Sequence, int]:
        """The token of each sequence that a grammar constrains. A step with one that samples is no loop of steps, and
        one with drafts is committed before another is planned.
        """
        token_ids, _ = self.results()
        rows = self.plan.places()
        return {
            row.sequence: token_ids[0][place] for row, place in rows if row.num_sampled and row.sequence.is_constrained
        }


def _drawn_by(row: Row, sampled: list[int], place: int) -> Rows[int]:
    if row.num_scored and min(scored := sampled[place - row.num_scored : place]) < 0:
        return (min(scored),)  # the model broke down inside the prompt
    if not row.drafts:
        return sampled[place : place + row.num_drawn]
    return verified(row.drafts, sampled[place : place + row.num_drawn])


def verified(drafts: Rows[int], sampled: Rows[int]) -> Rows[int]:
    """The tokens that would have been drawn one by one: `sampled[i]` is the one behind the first `i` of `drafts`.

    What is drawn depends on the tokens before, the seed and its index alone: so it counts where all drafts before it
    are what was drawn there. Where a draft got no token, the next step finds out what is wrong.
    """
    count = 1
    while count < len(sampled) and drafts[count - 1] == sampled[count - 1] and sampled[count] >= 0:
        count += 1
    return sampled[:count]
