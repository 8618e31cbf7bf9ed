"""Packs a plan into the one integer array per step that goes to the device, and names its parts on both sides."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.attention import RaggedBatch
from penstock.engine.execution.sampling import NEVER, NOT_A_TOKEN, ExtendedRows, SamplingRows
from penstock.engine.request import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from penstock.engine.scheduling.scheduler import Plan, Row
from penstock.engine.scheduling.sequence import Sequence

MIN_BUCKET = 16

NUM_SAMPLING_WORDS = 7
_NUM_EXTENDED_WORDS = 6


class Layout:
    """Named i32 parts of one flat array."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._parts: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            end = self.size + math.prod(shape)
            self._parts[name] = (self.size, end, shape)
            self.size = end

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A new array of zeros, and views of its parts. New each time: the device may still read the last one."""
        flat = np.zeros(self.size, np.int32)
        return flat, {name: flat[start:end].reshape(shape) for name, (start, end, shape) in self._parts.items()}

    def unpack(self, flat: jax.Array) -> dict[str, jax.Array]:
        return {name: flat[start:end].reshape(shape) for name, (start, end, shape) in self._parts.items()}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The closed set of shapes that an engine's steps have."""

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    page_size: int
    vocab_size: int
    few_shapes: bool = False  # where compiling is slow

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """A step is padded to the next one."""
        return _buckets(self.max_batch_tokens, few=self.few_shapes)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Of sampled rows."""
        return _buckets(self.max_num_seqs, few=self.few_shapes)

    @property
    def extended_row_buckets(self) -> tuple[int, ...]:
        """Of steps in which a row asks for extended sampling: with few shapes, the largest alone."""
        return self.row_buckets[-1:] if self.few_shapes else self.row_buckets

    @property
    def max_rows(self) -> int:
        return self.row_buckets[-1]

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    def step_layout(self, num_tokens: int) -> Layout:
        """Of the array that a step of a token bucket uploads."""
        max_seqs = min(num_tokens, self.max_rows)
        return Layout(
            token_ids=(num_tokens,),
            sources=(num_tokens,),
            positions=(num_tokens,),
            slots=(num_tokens,),
            kv_lens=(max_seqs,),
            cu_q_lens=(max_seqs + 1,),
            num_seqs=(1,),
            page_indices=(max_seqs, self.pages_per_seq),
            sampled_tokens=(max_seqs,),
            sampling=(max_seqs, NUM_SAMPLING_WORDS),
        )

    def stops_layout(self, num_rows: int) -> Layout:
        """Of the second array that several decode steps in one dispatch upload: when each row ends."""
        return Layout(stop_ids=(num_rows, MAX_STOP_TOKENS), limits=(num_rows,))

    def extended_layout(self, num_rows: int) -> Layout:
        """Of the second array, which only steps with extended sampling upload."""
        return Layout(
            history=(num_rows, self.max_model_len),
            words=(num_rows, _NUM_EXTENDED_WORDS),
            sources=(num_rows,),
            bias_ids=(num_rows, MAX_BIASED_TOKENS),
            bias=(num_rows, MAX_BIASED_TOKENS),
            is_allowed=(num_rows, MAX_BIASED_TOKENS),
            blocked_ids=(num_rows, MAX_STOP_TOKENS),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepInputs:
    """The device's side of a packed step."""

    token_ids: jax.Array  # i32 [num_tokens]
    sources: (
        jax.Array
    )  # i32 [num_tokens]: the row of the last step whose sampled token stands here, -1 for an uploaded id
    positions: jax.Array  # i32 [num_tokens]
    ragged: RaggedBatch
    sampled_tokens: jax.Array  # i32 [max_seqs]: the token whose hidden state each sampled row takes
    sampling: jax.Array  # i32 [max_seqs, words]


def unpack_step(layout: Layout, flat: jax.Array) -> StepInputs:
    parts = layout.unpack(flat)
    ragged = RaggedBatch(
        slots=parts["slots"],
        kv_lens=parts["kv_lens"],
        page_indices=parts["page_indices"],
        cu_q_lens=parts["cu_q_lens"],
        num_seqs=parts["num_seqs"],
    )
    return StepInputs(
        token_ids=parts["token_ids"],
        sources=parts["sources"],
        positions=parts["positions"],
        ragged=ragged,
        sampled_tokens=parts["sampled_tokens"],
        sampling=parts["sampling"],
    )


def unpack_sampling(words: jax.Array) -> SamplingRows:  # i32 [num_rows, words]
    return SamplingRows(
        temperature=_as_float(words[:, 0]),
        top_p=_as_float(words[:, 1]),
        min_p=_as_float(words[:, 2]),
        top_k=words[:, 3],
        seed=jax.lax.bitcast_convert_type(words[:, 4:6], jnp.uint32),
        output_index=words[:, 6],
    )


def unpack_extended(layout: Layout, flat: jax.Array, last_tokens: jax.Array) -> ExtendedRows:
    """`last_tokens` holds the tokens in flight, which the host could not upload with the rest of the history."""
    parts = layout.unpack(flat)
    words = parts["words"]
    in_flight = (parts["sources"][:, None] >= 0) & (jnp.arange(parts["history"].shape[1])[None] == words[:, 5:6])
    history = jnp.where(in_flight, last_tokens[parts["sources"]][:, None], parts["history"])
    return ExtendedRows(
        history=history,
        num_prompt=words[:, 0],
        repetition_penalty=_as_float(words[:, 1]),
        presence_penalty=_as_float(words[:, 2]),
        frequency_penalty=_as_float(words[:, 3]),
        bias_ids=parts["bias_ids"],
        bias=_as_float(parts["bias"]),
        is_restricted=words[:, 4],
        is_allowed=parts["is_allowed"],
        blocked_ids=parts["blocked_ids"],
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed step, or several decode steps."""

    num_tokens: int  # the token bucket
    num_rows: int  # the row bucket, 0 if nothing is sampled
    num_steps: int
    flat: np.ndarray
    extended: np.ndarray | None
    stops: np.ndarray | None  # with several steps: when each row ends


class _Mirror:
    """A table that follows the growing lists of running sequences, one lane each, copying only what is new."""

    def __init__(self, num_lanes: int, width: int, padding: int) -> None:
        self.table = np.full((num_lanes, width), padding, np.int32)
        self._padding = padding
        self._holders: list[tuple[Sequence, int] | None] = [None] * num_lanes
        self._num_written = [0] * num_lanes

    def follow(self, sequence: Sequence, values: list[int]) -> None:
        lane = sequence.lane
        holder = (sequence, sequence.num_starts)
        if self._holders[lane] != holder:
            self._holders[lane] = holder
            self._num_written[lane] = 0
            self.table[lane] = self._padding
        written = self._num_written[lane]
        if written < len(values):
            self.table[lane, written : len(values)] = values[written:]
            self._num_written[lane] = len(values)


class BatchBuilder:
    """Turns plans into batches. Plans must come in the order in which they are dispatched."""

    def __init__(self, geometry: Geometry, eos_token_ids: tuple[int, ...]) -> None:
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        self._pages = _Mirror(geometry.max_num_seqs, geometry.pages_per_seq, 0)
        self._history = _Mirror(geometry.max_num_seqs, geometry.max_model_len, geometry.vocab_size)
        self._rows_in_flight: dict[Sequence, int] = {}  # where the last step samples each sequence's next token

    def build(self, plan: Plan) -> Batch:
        num_tokens = _bucket(plan.num_tokens, self._geometry.token_buckets)
        flat, parts = self._geometry.step_layout(num_tokens).empty()
        self._pack_tokens(plan, parts)
        sampled = plan.sampled
        ends = np.cumsum([row.num_tokens for row in plan.rows]) - 1
        is_sampled = [row.num_sampled > 0 for row in plan.rows]
        parts["sampled_tokens"][: len(sampled)] = ends[is_sampled]
        if sampled:
            parts["sampling"][: len(sampled)] = [_sampling_words(row) for row in sampled]
        num_rows = _bucket(len(sampled), self._geometry.row_buckets) if sampled else 0
        extended = None
        if any(row.sequence.request.sampling.needs_extended_sampler for row in sampled):
            num_rows = _bucket(len(sampled), self._geometry.extended_row_buckets)
            extended = self._pack_extended(sampled, num_rows)
        if sampled:
            self._rows_in_flight = {row.sequence: place for place, row in enumerate(sampled)}
        stops = self._pack_stops(sampled, num_tokens) if plan.num_steps > 1 else None
        return Batch(num_tokens, num_rows, plan.num_steps, flat, extended, stops)

    def _pack_stops(self, sampled: tuple[Row, ...], num_rows: int) -> np.ndarray:
        flat, parts = self._geometry.stops_layout(num_rows).empty()
        parts["stop_ids"][:] = NOT_A_TOKEN
        for place, row in enumerate(sampled):
            ids = stop_ids(row.sequence.request.sampling, self._eos_token_ids)
            parts["stop_ids"][place, : len(ids)] = ids
            parts["limits"][place] = row.num_sampled
        return flat

    def _pack_tokens(self, plan: Plan, parts: dict[str, np.ndarray]) -> None:
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
        lanes = np.array([row.sequence.lane for row in plan.rows], np.int32)
        parts["token_ids"][: plan.num_tokens] = token_ids
        cumulative = np.cumsum(lengths)
        parts["cu_q_lens"][1 : num_seqs + 1] = cumulative
        parts["cu_q_lens"][num_seqs + 1 :] = plan.num_tokens
        parts["kv_lens"][:num_seqs] = starts + lengths
        parts["num_seqs"][0] = num_seqs
        parts["page_indices"][:num_seqs] = self._pages.table[lanes]
        positions = np.arange(plan.num_tokens, dtype=np.int32) + np.repeat(starts - (cumulative - lengths), lengths)
        parts["positions"][: plan.num_tokens] = positions
        pages = self._pages.table[np.repeat(lanes, lengths), positions // page_size]
        parts["slots"][: plan.num_tokens] = pages * page_size + positions % page_size

    def _pack_extended(self, sampled: tuple[Row, ...], num_rows: int) -> np.ndarray:
        flat, parts = self._geometry.extended_layout(num_rows).empty()
        vocab = self._geometry.vocab_size
        for name in ("history", "bias_ids", "blocked_ids"):
            parts[name][:] = vocab
        parts["sources"][:] = -1
        parts["words"][:] = _NEUTRAL_WORDS
        for place, row in enumerate(sampled):
            sequence, params = row.sequence, row.sequence.request.sampling
            if not params.needs_extended_sampler:
                continue
            num_known = len(sequence.token_ids)
            self._history.follow(sequence, sequence.token_ids)
            parts["history"][place] = self._history.table[sequence.lane]
            parts["words"][place] = (*_extended_words(params, sequence.num_prompt), num_known)
            if row.num_known < row.num_tokens:
                parts["sources"][place] = self._rows_in_flight[sequence]
            ids, bias, is_allowed = _biases(params)
            parts["bias_ids"][place, : len(ids)] = ids
            parts["bias"][place, : len(ids)] = np.array(bias, np.float32).view(np.int32)
            parts["is_allowed"][place, : len(ids)] = is_allowed
            if row.output_index < params.min_tokens:
                blocked = stop_ids(params, self._eos_token_ids)
                parts["blocked_ids"][place, : len(blocked)] = blocked
        return flat


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The token ids that end a sequence."""
    return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)


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


def _as_float(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _bucket(count: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= count)


def _buckets(at_least: int, *, few: bool) -> tuple[int, ...]:
    """Powers of two, and unless there are to be few, from 32 on a number between two of them."""
    buckets = [MIN_BUCKET]
    while buckets[-1] < at_least:
        last = buckets[-1]
        is_power = last & (last - 1) == 0
        step = last // 2 if is_power else last // 3
        buckets.append(2 * last if few or last == MIN_BUCKET else last + step)
    return tuple(buckets)


_NEUTRAL_WORDS = (*_extended_words(SamplingParams(), 0), 0)
