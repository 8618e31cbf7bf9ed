"""A step between its dispatch and its commit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

from penstock.engine.execution.runner import InFlight
from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan


class StepFailed(Exception):
    """A step raised, either at its dispatch or when its results were read. The cause is the original exception."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(f"a step of {len(plan.rows)} sequences")
        self.plan = plan


class DrawnTokens(NamedTuple):
    row: Row
    token_ids: Rows[int]  # consecutive tokens; a value below 0 means no token and is the last
    place: int  # index of the first one in `logprobs`; scored prompt tokens come before it
    logprobs: Logprobs | None


class Dispatched:
    """A step in flight. Its results can be read repeatedly and stay the same; a failed step stays failed."""

    def __init__(self, plan: StepPlan, in_flight: InFlight) -> None:
        self.plan = plan
        self._in_flight = in_flight
        self._results: tuple[list[list[int]], list[Logprobs] | None] | Exception | None = None

    def results(self) -> tuple[list[list[int]], list[Logprobs] | None]:
        """Waits for the step; returns its tokens and log-probabilities in the form of `InFlight`."""
        if self._results is None:
            try:
                self._results = self._in_flight.token_ids(), self._in_flight.logprobs()
            except Exception as error:
                self._results = error
        if isinstance(self._results, Exception):
            raise StepFailed(self.plan) from self._results
        return self._results

    def drawn(self) -> Iterator[DrawnTokens]:
        """Waits for the step; yields what each row drew, step by step if there are several.

        A row may take part in the first steps only; later results for it mean nothing and are left out.
        """
        token_ids, logprobs = self.results()
        for step, sampled in enumerate(token_ids):
            found = None if logprobs is None else logprobs[step]
            for row, place in self.plan.places():
                if step < max(1, row.num_sampled):
                    yield DrawnTokens(row, _drawn_by(row, sampled, place), place, found)

    def newest(self) -> dict[Sequence, int]:
        """Returns the token of each grammar-constrained sequence.

        A step that samples a constrained sequence is never a loop of steps, and one with drafts is committed before the
        next is planned.
        """
        token_ids, _ = self.results()
        rows = self.plan.places()
        return {
            row.sequence: token_ids[0][place] for row, place in rows if row.num_sampled and row.sequence.is_constrained
        }


def _drawn_by(row: Row, sampled: list[int], place: int) -> Rows[int]:
    if row.num_scored and min(scored := sampled[place - row.num_scored : place]) < 0:
        return (min(scored),)  # the model's numbers broke down inside the prompt
    if not row.drafts:
        return sampled[place : place + row.num_drawn]
    return verified(row.drafts, sampled[place : place + row.num_drawn])


def verified(drafts: Rows[int], sampled: Rows[int]) -> Rows[int]:
    """Returns the tokens that would have been drawn one by one: `sampled[i]` follows the first `i` of `drafts`.

    What is drawn depends only on the tokens before, the seed and the index, so a token counts if all drafts before it
    match what was drawn in their place. If no token could be drawn after a draft, the next step finds out why.
    """
    count = 1
    while count < len(sampled) and drafts[count - 1] == sampled[count - 1] and sampled[count] >= 0:
        count += 1
    return sampled[:count]
