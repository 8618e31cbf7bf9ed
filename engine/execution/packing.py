"""Packs a plan into the one integer array per step that goes to the device."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling import NEVER, NOT_A_TOKEN
from penstock.engine.request import SamplingParams
from penstock.engine.scheduling.scheduler import Row, StepPlan
from penstock.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed step, or several decode steps."""

    num_tokens: int  # the token bucket
    num_rows: int  # the row bucket, 0 if nothing is sampled
    num_steps: int
    num_sampled: int  # rows
    flat: np.ndarray
    extended: np.ndarray | None
    stops: np.ndarray | None  # with several steps: when each row ends


class _Mirror:
    """A table that follows the growing lists of running sequences, one batch slot each, copying only what is new."""

    def __init__(self, num_slots: int, width: int, padding: int) -> None:
        self.table = np.full((num_slots, width), padding, np.int32)
        self._padding = padding
        self._holders: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._num_written = [0] * num_slots

    def follow(self, sequence: Sequence, values: list[int]) -> None:
        slot = sequence.batch_slot
        holder = (sequence, sequence.num_starts)
        if self._holders[slot] != holder:
            self._holders[slot] = holder
            self._num_written[slot] = 0
            self.table[slot] = self._padding
        written = self._num_written[slot]
        if written < len(values):
            self.table[slot, written : len(values)] = values[written:]
            self._num_written[slot] = len(values)


class BatchBuilder:
    """Turns plans into batches. Plans must come in the order in which they are dispatched."""

    def __init__(self, geometry: Geometry, eos_token_ids: tuple[int, ...]) -> None:
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        self._pages = _Mirror(geometry.max_num_seqs, geometry.pages_per_seq, 0)
        self._history = _Mirror(geometry.max_num_seqs, geometry.max_model_len, geometry.vocab_size)
        self._rows_in_flight: dict[Sequence, int] = {}  # where the last step samples each sequence's next token

    def build(self, plan: StepPlan) -> Batch:
        num_tokens = self._geometry.token_bucket(plan.num_tokens)
        flat, parts = self._geometry.step_layout(num_tokens).empty()
        self._pack_tokens(plan, parts)
        sampled = plan.sampled
        ends = np.cumsum([row.num_tokens for row in plan.rows]) - 1
        is_sampled = [row.num_sampled > 0 for row in plan.rows]
        parts["sampled_tokens"][: len(sampled)] = ends[is_sampled]
        if sampled:
            parts["sampling"][: len(sampled)] = [_sampling_words(row) for row in sampled]
        num_rows = self._geometry.row_bucket(len(sampled)) if sampled else 0
        extended = None
        if any(row.sequence.request.sampling.needs_extended_sampler for row in sampled):
            num_rows = self._geometry.row_bucket(len(sampled), extended=True)
            extended = self._pack_extended(sampled, num_rows)
        if sampled:
            self._rows_in_flight = {row.sequence: place for place, row in enumerate(sampled)}
        stops = self._pack_stops(sampled, num_tokens) if plan.num_steps > 1 else None
        return Batch(num_tokens, num_rows, plan.num_steps, len(sampled), flat, extended, stops)

    def _pack_stops(self, sampled: tuple[Row, ...], num_rows: int) -> np.ndarray:
        flat, parts = self._geometry.stops_layout(num_rows).empty()
        parts["stop_ids"][:] = NOT_A_TOKEN
        for place, row in enumerate(sampled):
            ids = row.sequence.request.sampling.stop_ids(self._eos_token_ids)
            parts["stop_ids"][place, : len(ids)] = ids
            parts["limits"][place] = row.num_sampled
        return flat

    def _pack_tokens(self, plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
        page_size = self._geometry.page_size
        num_seqs = len(plan.rows)
        lengths = np.array([row.num_tokens for row in plan.rows], np.int32)
        starts = np.array([row.start for row in plan.rows], np.int32)
        token_ids: list[int] = []
        sources = parts["sources"]
        sources[:] = -1
        for row in plan.rows:
            sequence = row.sequence
            self._pages.follow(sequence, sequence.pages)
            token_ids += sequence.token_ids[row.start : row.start + row.num_known]
            if row.num_known < row.num_tokens:
                sources[len(token_ids)] = self._rows_in_flight[sequence]
                token_ids.append(0)
        batch_slots = np.array([row.sequence.batch_slot for row in plan.rows], np.int32)
        parts["token_ids"][: plan.num_tokens] = token_ids
        cumulative = np.cumsum(lengths)
        parts["cu_q_lens"][1 : num_seqs + 1] = cumulative
        parts["cu_q_lens"][num_seqs + 1 :] = plan.num_tokens
        parts["kv_lens"][:num_seqs] = starts + lengths
        parts["num_seqs"][0] = num_seqs
        parts["page_indices"][:num_seqs] = self._pages.table[batch_slots]
        positions = np.arange(plan.num_tokens, dtype=np.int32) + np.repeat(starts - (cumulative - lengths), lengths)
        parts["positions"][: plan.num_tokens] = positions
        pages = self._pages.table[np.repeat(batch_slots, lengths), positions // page_size]
        parts["slots"][: plan.num_tokens] = pages * page_size + positions % page_size

    def _pack_extended(self, sampled: tuple[Row, ...], num_rows: int) -> np.ndarray:
        flat, parts = neutral_options(self._geometry, num_rows)
        for place, row in enumerate(sampled):
            sequence, params = row.sequence, row.sequence.request.sampling
            if not params.needs_extended_sampler:
                continue
            num_known = len(sequence.token_ids)
            self._history.follow(sequence, sequence.token_ids)
            parts["history"][place] = self._history.table[sequence.batch_slot]
            parts["words"][place] = (*_extended_words(params, sequence.num_prompt), num_known)
            if row.num_known < row.num_tokens:
                parts["sources"][place] = self._rows_in_flight[sequence]
            ids, bias, is_allowed = _biases(params)
            parts["bias_ids"][place, : len(ids)] = ids
            parts["bias"][place, : len(ids)] = np.array(bias, np.float32).view(np.int32)
            parts["is_allowed"][place, : len(ids)] = is_allowed
            if row.output_index < params.min_tokens:
                blocked = params.stop_ids(self._eos_token_ids)
                parts["blocked_ids"][place, : len(blocked)] = blocked
        return flat


def neutral_options(geometry: Geometry, num_rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The extended options of rows that ask for none, and views of their parts."""
    flat, parts = geometry.extended_layout(num_rows).empty()
    for name in ("history", "bias_ids", "blocked_ids"):
        parts[name][:] = geometry.vocab_size
    parts["sources"][:] = -1
    parts["words"][:] = _NEUTRAL_WORDS
    return flat, parts


def _sampling_words(row: Row) -> tuple[int, ...]:
    sequence = row.sequence
    if not sequence.sampling_words:
        params, seed = sequence.request.sampling, sequence.seed
        sequence.sampling_words = (
            _as_word(params.temperature),
            _as_word(params.top_p),
            _as_word(params.min_p),
            min(params.top_k, 2**31 - 1),
            _signed(seed >> 32),
            _signed(seed & 0xFFFFFFFF),
        )
    return (*sequence.sampling_words, row.output_index)


def _extended_words(params: SamplingParams, num_prompt: int) -> tuple[int, ...]:
    return (
        num_prompt,
        _as_word(params.repetition_penalty),
        _as_word(params.presence_penalty),
        _as_word(params.frequency_penalty),
        int(bool(params.allowed_token_ids)),
    )


def _biases(params: SamplingParams) -> tuple[list[int], list[float], list[int]]:
    """Ids, what is added to their logits, and whether each is one of the allowed."""
    allowed, bad = params.allowed_token_ids, params.bad_token_ids
    ids = [*params.logit_bias, *allowed, *bad]
    bias = [*params.logit_bias.values(), *[0.0] * len(allowed), *[NEVER] * len(bad)]
    return ids, bias, [0] * len(params.logit_bias) + [1] * len(allowed) + [0] * len(bad)


def _as_word(value: float) -> int:
    """The bits of an f32, as the i32 that travels."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_NEUTRAL_WORDS = (*_extended_words(SamplingParams(), 0), 0)
