"""Packs the options that only some rows of a step ask for, and tracks whose sampling state each batch slot has."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.extended_rows import ADJUSTED, BIASED, NO_DRAFT, NO_TARGET
from penstock.engine.execution.sampling.sampling_state import SlotFill, slot_fill
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan

MAX_WORD = 2**31 - 1  # no token count comes near it: a larger bound means the same


class HeadRow(NamedTuple):
    """A row of the head: it samples after a token of the step, or scores the known next token."""

    row: Row
    token: int  # its index among the step's tokens
    target: int  # the token to score, else NO_TARGET
    draft: int  # the token before it if that is a draft, else NO_DRAFT
    output_index: int  # of the token it draws
    is_adjusted: bool  # whether penalties, biases or restrictions change its logits; never for prompt scoring
    is_scored: bool  # whether it wants log-probabilities


def head_rows(plan: StepPlan) -> list[HeadRow]:
    """Returns the head's rows in the order of the plan's; each row's scored tokens come first."""
    found: list[HeadRow] = []
    end = 0
    for row in plan.rows:
        start, end = end, end + row.num_tokens
        for place in range(row.num_scored):
            target = row.sequence.token_ids[row.start + place + 1]
            found.append(HeadRow(row, start + place, target, NO_DRAFT, 0, is_adjusted=False, is_scored=True))
        if row.num_sampled:
            found.append(_drawing(row, end - row.num_drawn, NO_DRAFT, row.output_index))
            for behind, draft in enumerate(row.drafts, 1):
                found.append(_drawing(row, end - row.num_drawn + behind, draft, row.output_index + behind))
    return found


def _drawing(row: Row, token: int, draft: int, output_index: int) -> HeadRow:
    params = row.sequence.request.sampling
    adjusts = params.adjusts_logits or output_index < params.min_tokens
    return HeadRow(row, token, NO_TARGET, draft, output_index, adjusts, params.logprobs is not None)


class SamplingBatch(NamedTuple):
    flat: np.ndarray
    fills: tuple[SlotFill, ...]  # for batch slots with a new holder
    has_logprobs: bool


class OptionsBuilder:
    """Builds the options of plans, which must come in the order of their dispatch."""

    def __init__(self, geometry: Geometry, eos_token_ids: tuple[int, ...]) -> None:
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        self._holders: list[tuple[Sequence, int] | None] = [None] * geometry.max_num_seqs
        self._words: list[tuple[int, ...]] = [_NEUTRAL_WORDS] * geometry.max_num_seqs

    def build(self, rows: Rows[HeadRow], num_rows: int) -> SamplingBatch | None:
        """Returns the options for the head's or the loop's bucket `num_rows`, or None if no row asks for any."""
        if not any(row.is_adjusted or row.is_scored for row in rows):
            return None
        flat, parts = neutral_options(self._geometry, num_rows)
        fills = [fill for row in rows if row.is_adjusted and (fill := self._follow(row.row.sequence)) is not None]
        parts["words"][: len(rows)] = [self._words_of(row) for row in rows]
        return SamplingBatch(flat, tuple(fills), any(row.is_scored for row in rows))

    def _follow(self, sequence: Sequence) -> SlotFill | None:
        """Returns the state of a sequence that samples first after its start; later the device keeps it."""
        slot, holder = sequence.batch_slot, (sequence, sequence.num_starts)
        if self._holders[slot] == holder:
            return None
        self._holders[slot] = holder
        params = sequence.request.sampling
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        flags = ADJUSTED * (penalties != _NO_PENALTIES or params.min_tokens > 0)
        flags |= BIASED * bool(params.logit_bias or params.allowed_token_ids or params.bad_token_ids)
        self._words[slot] = (slot, flags, *map(as_word, penalties), min(params.min_tokens, MAX_WORD))
        return slot_fill(
            self._geometry,
            slot,
            prompt=sequence.token_ids[: sequence.num_prompt],
            generated=sequence.token_ids[sequence.num_prompt :],
            stops=params.stop_ids(self._eos_token_ids),
            bias=params.logit_bias,
            allowed=params.allowed_token_ids,
            bad=params.bad_token_ids,
        )

    def _words_of(self, row: HeadRow) -> tuple[int, ...]:
        words = self._words[row.row.sequence.batch_slot] if row.is_adjusted else _NEUTRAL_WORDS
        return (*words, row.target, row.draft if row.is_adjusted else NO_DRAFT, int(row.is_scored))


def neutral_options(geometry: Geometry, num_rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the options of rows that ask for none, and views of their parts."""
    flat, parts = geometry.extended_layout(num_rows).empty()
    parts["words"][:] = (*_NEUTRAL_WORDS, NO_TARGET, NO_DRAFT, 0)
    return flat, parts


def as_word(value: float) -> int:
    """Returns the bits of an f32 as the i32 that is uploaded."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


_NO_PENALTIES = (1.0, 0.0, 0.0)
_NEUTRAL_WORDS = (0, 0, *map(as_word, _NO_PENALTIES), 0)
