"""What a step computes, as values made by the scheduler and read by the code that packs, runs and commits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.scheduling.memory.state_table import NO_STATES, RowStates
from penstock.engine.scheduling.sequence import Sequence


class Row(NamedTuple):
    """The tokens `[start, start + num_tokens)` of one sequence, computed in one step.

    With `drafts`, these are its last token, which the host knows, followed by the drafts. Each draft is a guess that is
    verified by the token drawn before it. A row with drafts samples after each of its tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_known: int  # tokens among them that the host knows; one more may be in flight
    num_sampled: int  # 0 if the row does not reach the sequence's end, otherwise 1 up to the plan's steps
    output_index: int  # of the first token it samples, counted from the first generated token
    num_scored: int = 0  # number of leading tokens that score the token after them
    drafts: tuple[int, ...] = ()
    states: RowStates = NO_STATES

    @property
    def num_drawn(self) -> int:
        """Number of head rows that draw a token for it, in each step of its plan."""
        return 1 + len(self.drafts) if self.num_sampled else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, or several decode steps of the same rows in one dispatch.

    Its rows keep what was true at planning, for the first of these steps; their sequences move on.
    """

    rows: tuple[Row, ...]
    num_tokens: int
    num_steps: int = 1

    @property
    def sampled(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.num_sampled)

    @property
    def has_drafts(self) -> bool:
        """Whether it has drafts. If so, nothing can be planned before its results show how far its sequences get."""
        return any(row.drafts for row in self.rows)

    def places(self) -> Iterator[tuple[Row, int]]:
        """Yields its rows, each with the place of its first drawn token among the rows of the head.

        Its scoring rows come before that place; those that draw after its drafts follow it.
        """
        place = 0
        for row in self.rows:
            place += row.num_scored
            yield row, place
            place += row.num_drawn

    @property
    def is_constrained(self) -> bool:
        """Whether what a row may draw depends on earlier tokens that the host has to see first."""
        return any(row.num_sampled and row.sequence.is_constrained for row in self.rows)


def row_of(sequence: Sequence, num_tokens: int, num_sampled: int, drafts: tuple[int, ...] = ()) -> Row:
    """Returns the row for a sequence's next `num_tokens` tokens.

    If they reach its end, the row samples, and then also computes the drafts after it.
    """
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
