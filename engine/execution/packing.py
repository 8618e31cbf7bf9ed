"""Packs a plan into one integer array for the device, and into further ones for stop ids and options where needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.extended_rows import NO_TARGET
from penstock.engine.execution.sampling.options import (
    MAX_WORD,
    HeadRow,
    OptionsBuilder,
    SamplingBatch,
    as_word,
    head_rows,
)
from penstock.engine.execution.sampling_rows import GREEDY, NOT_A_TOKEN, PARAMETERS
from penstock.engine.request import SamplingParams
from penstock.engine.scheduling.memory.page_table import PageTable
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed step, or several decode steps."""

    num_tokens: int  # the token bucket
    num_rows: int  # the row bucket, 0 if nothing is sampled
    num_steps: int
    num_sampled: int  # rows of the head, including those that only score
    flat: np.ndarray
    options: SamplingBatch | None  # if a row asks for extended sampling
    stops: np.ndarray | None  # with several steps: when each row ends
    places: tuple[int, ...] = ()  # of the head's sampling rows: where their masks go


class _Mirror:
    """Mirrors one group's page tables of running sequences, a batch slot each, copying only what is new."""

    def __init__(self, group: int, num_slots: int, width: int) -> None:
        self.table = np.zeros((num_slots, width), np.int32)
        self._group = group
        self._followed = [PageTable() for _ in range(num_slots)]  # a sequence gets a new one whenever it starts
        self._num_written = [0] * num_slots
        self._num_passed = [0] * num_slots

    def follow(self, slot: int, pages: PageTable) -> None:
        if self._followed[slot] is not pages:
            self._followed[slot] = pages
            self._num_written[slot] = self._num_passed[slot] = 0
            self.table[slot] = 0
        written, num_places = self._num_written[slot], pages.num_places
        if written < num_places:
            self.table[slot, written:num_places] = pages.groups[self._group][written:]
            self._num_written[slot] = num_places
        passed = pages.num_passed[self._group]
        if self._num_passed[slot] < passed:
            self.table[slot, self._num_passed[slot] : passed] = 0
            self._num_passed[slot] = passed


class BatchBuilder:
    """Turns plans into batches. Plans must come in the order in which they are dispatched."""

    def __init__(self, geometry: Geometry, eos_token_ids: tuple[int, ...]) -> None:
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        self._pages = [
            _Mirror(group, geometry.max_num_seqs, geometry.pages_per_seq) for group in range(geometry.num_groups)
        ]
        self._options = OptionsBuilder(geometry, eos_token_ids)
        self._rows_in_flight: dict[Sequence, int] = {}  # row in which the last step samples each sequence's next token

    def build(self, plan: StepPlan) -> Batch:
        num_tokens = self._geometry.token_bucket(plan.num_tokens)
        flat, parts = self._geometry.step_layout(num_tokens).empty()
        self._pack_tokens(plan, parts)
        rows = head_rows(plan)
        num_extended = num_tokens if plan.num_steps > 1 else self._geometry.row_bucket(len(rows), extended=True)
        options = self._options.build(rows, num_extended)
        num_rows = 0
        if rows:
            parts["sampled_tokens"][: len(rows)] = [row.token for row in rows]
            parts["num_sampled"][0] = len(rows)
            parts["sampling"][: len(rows)] = [
                _sampling_words(row) if row.target == NO_TARGET else _GREEDY_WORDS for row in rows
            ]
            num_rows = self._geometry.row_bucket(len(rows), extended=options is not None)
            self._rows_in_flight = {row.row.sequence: place for place, row in enumerate(rows)}
        stops = self._pack_stops(rows, num_tokens) if plan.num_steps > 1 else None
        if self._geometry.has_states:
            _pack_states(plan, parts)
        places = tuple(place for place, row in enumerate(rows) if row.target == NO_TARGET)
        return Batch(num_tokens, num_rows, plan.num_steps, len(rows), flat, options, stops, places)

    def _pack_stops(self, rows: list[HeadRow], num_rows: int) -> np.ndarray:
        flat, parts = self._geometry.stops_layout(num_rows).empty()
        parts["stop_ids"][:] = NOT_A_TOKEN
        for place, head_row in enumerate(rows):
            row = head_row.row
            ids = row.sequence.request.sampling.stop_ids(self._eos_token_ids)
            parts["stop_ids"][place, : len(ids)] = ids
            parts["limits"][place] = row.num_sampled
            if len(row.states.writes) > 1:
                [(parts["switch_steps"][place], _), (_, parts["switch_slots"][place])] = row.states.writes
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
            token_ids += sequence.token_ids[row.start : row.start + row.num_known]
            if row.drafts:
                token_ids += row.drafts
            elif row.num_known < row.num_tokens:
                sources[len(token_ids)] = self._rows_in_flight[sequence]
                token_ids.append(0)
        batch_slots = np.array([row.sequence.batch_slot for row in plan.rows], np.int32)
        parts["token_ids"][: plan.num_tokens] = token_ids
        cumulative = np.cumsum(lengths)
        parts["cu_q_lens"][1 : num_seqs + 1] = cumulative
        parts["cu_q_lens"][num_seqs + 1 :] = plan.num_tokens
        parts["kv_lens"][:num_seqs] = starts + lengths
        parts["num_seqs"][0] = num_seqs
        positions = np.arange(plan.num_tokens, dtype=np.int32) + np.repeat(starts - (cumulative - lengths), lengths)
        parts["positions"][: plan.num_tokens] = positions
        if self._geometry.has_lengths:
            rope_lengths = np.array([row.sequence.rope_length for row in plan.rows], np.int32)
            parts["rope_lengths"][: plan.num_tokens] = np.repeat(rope_lengths, lengths)
        numbers, places, holders = positions // page_size, positions % page_size, np.repeat(batch_slots, lengths)
        for group, mirror in enumerate(self._pages):
            for row in plan.rows:
                mirror.follow(row.sequence.batch_slot, row.sequence.pages)
            parts["page_indices"][group, :num_seqs] = mirror.table[batch_slots]
            parts["slots"][group, : plan.num_tokens] = mirror.table[holders, numbers] * page_size + places


def _pack_states(plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
    """Packs the state slots. With several steps in one dispatch, later switches are packed with the stops."""
    first_tokens = parts["cu_q_lens"]
    parts["state_reads"][: len(plan.rows)] = [row.states.read for row in plan.rows]
    writes = [
        (first + num_tokens - 1, slot)
        for first, row in zip(first_tokens, plan.rows, strict=False)
        for num_tokens, slot in (row.states.writes[:1] if plan.num_steps > 1 else row.states.writes)
    ]
    parts["state_ends"][: len(writes)], parts["state_writes"][: len(writes)] = zip(*writes, strict=True)


def _sampling_words(row: HeadRow) -> tuple[int, ...]:
    sequence = row.row.sequence
    if not sequence.sampling_words:
        seed = _signed(sequence.seed >> 32), _signed(sequence.seed & 0xFFFFFFFF)
        sequence.sampling_words = (*_parameter_words(sequence.request.sampling), *seed)
    return (*sequence.sampling_words, row.output_index)


def _parameter_words(params: SamplingParams) -> Iterator[int]:
    for name, kind in PARAMETERS.items():
        value = getattr(params, name)
        yield min(value, MAX_WORD) if kind is np.int32 else as_word(value)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_GREEDY_WORDS = (*_parameter_words(GREEDY), 0, 0, 0)
