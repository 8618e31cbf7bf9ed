"""What a step computes, as values: made by the scheduler, read by whoever packs, runs and commits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.state_table import NO_STATES, RowStates


class Row(NamedTuple):
    """The tokens `[start, start + num_tokens)` of one sequence, computed in one step.

    With `drafts`, they are its last token, which the host knows, and then those: guesses at what it goes on with, each
    of which is verified by the token drawn before it. A row with drafts samples behind each of its tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_known: int  # of those tokens, how many exist and the host knows; a further one is in flight
    num_sampled: int  # 0 if the row does not reach the sequence's end, else 1, or up to the plan's steps
    output_index: int  # of the first token it samples, counted from the first generated one
    num_scored: int = 0  # of its first tokens, so many have the log-probability of the one after them computed
    drafts: tuple[int, ...] = ()
    states: RowStates = NO_STATES

    @property
    def num_drawn(self) -> int:
        """Rows of the head that draw a token for it, in each step of its plan."""
        return 1 + len(self.drafts) if self.num_sampled else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, or several decode steps of the same rows in one dispatch.

    Its rows keep what was true when it was planned, of the first of these steps; their sequences move on.
    """

    rows: tuple[Row, ...]
    num_tokens: int
    num_steps: int = 1

    @property
    def sampled(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.num_sampled)

    @property
    def has_drafts(self) -> bool:
        """Then how far its sequences get is known with its results alone: nothing can be planned before those."""
        return any(row.drafts for row in self.rows)

    def places(self) -> Iterator[tuple[Row, int]]:
        """Its rows, each with the place of the first token that it draws among the rows of the head. Those that score
        come before, those that draw behind its drafts come after.
        """
        place = 0
        for row in self.rows:
            place += row.num_scored
            yield row, place
            place += row.num_drawn

    @property
    def is_constrained(self) -> bool:
        """Whether what a row may draw depends on the tokens before, which the host has to see first."""
        return any(row.num_sampled and row.sequence.is_constrained for row in self.rows)


def row_of(sequence: Sequence, num_tokens: int, num_sampled: int, drafts: tuple[int, ...] = ()) -> Row:
    """Of its next `num_tokens` tokens; it samples if they reach its end, and then computes the drafts behind it."""
    start, num_known = sequence.num_computed, len(sequence.token_ids)
    end, all_tokens = start + num_tokens, num_known + sequence.num_in_flight
    return Row(
        sequence,
        start,
        num_tokens + len(drafts),
        num_known=num_tokens if end <= num_known else max(0, num_known - start),
        num_sampled=num_sampled if end == all_tokens else 0,
        output_index=all_tokens - sequence.num_prompt,
        num_scored=_num_scored(sequence, start, num_tokens) if sequence.scores_prompt else 0,
        drafts=drafts,
    )


def _num_scored(sequence: Sequence, start: int, num_tokens: int) -> int:
    if not sequence.num_unscored:
        return 0
    return max(0, min(num_tokens, sequence.num_prompt - 1 - start))
