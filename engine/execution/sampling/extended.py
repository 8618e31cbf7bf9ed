"""Sampling with all options: penalties, biases, restrictions, masks and log-probabilities.

The rows that ask for none are sampled first. Then those that ask are sampled, a few at a time, so that a step costs
what they cost, however many others there are. An option that none of them asks for is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.logprobs import Logprobs, logprobs_of, no_logprobs
from penstock.engine.execution.sampling.sampling import Form, joined, sample, survey
from penstock.engine.execution.sampling.sampling_rows import NEVER, SamplingRows
from penstock.engine.execution.sampling.sampling_state import (
    GENERATED,
    IN_PROMPT,
    STOPS,
    SamplingState,
    counted,
    rows_of,
)
from penstock.engine.execution.sampling.vocab_shares import apply_by_rows, sample_shares
from penstock.engine.sharding.placement import Placement

NO_TARGET = -1
NO_DRAFT = -1

ADJUSTED = 1
BIASED = 2
"""Bits of the word that says how a row's logits change."""

_TPU_BLOCK = 16
_TPU_TILE = 8  # rows: a device takes as long for fewer
_CPU_BLOCK = 4

_T = TypeVar("_T")
_LARGEST = 1e29  # bound on adjusted logits in absolute value: none comes near NEVER


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExtendedRows:
    """Options of each row that only some requests ask for; their tokens and lists are in the slot's state."""

    slot: jax.Array  # i32 [num_rows]
    is_adjusted: jax.Array  # bool [num_rows]: whether penalties or `min_tokens` change its logits
    is_biased: jax.Array  # bool [num_rows]: whether its slot's biases do
    repetition_penalty: jax.Array  # f32 [num_rows]
    presence_penalty: jax.Array  # f32 [num_rows]
    frequency_penalty: jax.Array  # f32 [num_rows]
    min_tokens: jax.Array  # i32 [num_rows]: no stop token before that output index
    target: jax.Array  # i32 [num_rows]: the token to score, for a row that samples none; else NO_TARGET
    draft: jax.Array  # i32 [num_rows]: the draft before it, for an adjusted row; else NO_DRAFT
    is_scored: jax.Array  # bool [num_rows]: whether it wants log-probabilities

    @property
    def asks(self) -> jax.Array:
        """Whether it asks for anything here."""
        return self.is_adjusted | self.is_biased | self.is_scored | (self.target >= 0)

    @property
    def is_penalised(self) -> jax.Array:
        """Whether what a row samples changes what it samples next."""
        has_penalty = self.repetition_penalty != 1.0
        has_penalty |= (self.presence_penalty != 0.0) | (self.frequency_penalty != 0.0)
        return self.is_adjusted & has_penalty


class SeenDrafts(NamedTuple):
    """The drafts of a step, and which of them each row sees as if they had been generated: some in a row."""

    ids: jax.Array  # i32 [num_places]; NO_DRAFT if a place has none
    last: jax.Array  # i32 [num_rows]: the place of the last one seen
    num_seen: jax.Array  # i32 [num_rows]: how many are seen


class _Asked(NamedTuple):
    """The inputs that belong to single rows."""

    sampling: SamplingRows
    rows: ExtendedRows
    last_draft: jax.Array  # as in SeenDrafts
    num_drafts: jax.Array
    masks: jax.Array | None


_Common = tuple[SamplingState, jax.Array]
"""What all rows look up: the state of their batch slots, and the drafts by row."""


class _Order(NamedTuple):
    """The rows in another order: those that ask come first."""

    rows: jax.Array  # i32 [num_rows]: the row at each place
    places: jax.Array  # i32 [num_rows]: the place of each row
    num_asking: jax.Array  # i32 []


def sample_extended(
    logits_of: Callable[[jax.Array], jax.Array],  # i32 [num_rows], rows in any order -> f32 [num_rows, vocab_rows]
    sampling: SamplingRows,
    rows: ExtendedRows,
    state: SamplingState,
    masks: jax.Array | None = None,  # i32 [num_rows, mask_words]: which tokens may be drawn; -1 for all
    *,
    placement: Placement | None = None,  # how the vocabulary is split
    form: Form = Form.XLA,
    raw_logprobs: bool = False,  # whether log-probabilities are those of `logits`, before any adjustment
) -> tuple[jax.Array, Logprobs, SamplingState]:
    """Draws one token per row, i32 `[num_rows]`, and counts it. A row with a target returns that.

    The rows of one sequence after drafts follow the row without a draft, in order. Each sees the drafts up to it as if
    they had been generated; its own token is counted if these turn out right. A loop of steps has neither drafts nor
    masks.
    """
    drafts = seen_drafts(rows)
    order = _asking_first(rows.asks if masks is None else rows.asks | jnp.any(masks != -1, axis=-1))
    asked = _taken(_Asked(sampling, rows, drafts.last, drafts.num_seen, masks), order.rows)
    work = partial(_sample_whole_rows, form=form, raw_logprobs=raw_logprobs)
    common = state, drafts.ids
    # Logits are computed in that order, because moving the rows of a model's output costs far less than moving logits.
    found = _sampled_in_order(logits_of(order.rows), asked, order.num_asking, common, work, placement, form)
    token_ids, logprobs = _taken(found, order.places)
    is_drawn = rows.is_penalised
    if masks is not None:
        is_drawn = jax.lax.cond(
            jnp.any(rows.draft >= 0), behind_right_drafts, lambda drawn, *_: drawn, is_drawn, rows, token_ids
        )
    return token_ids, logprobs, counted(state, rows.slot, token_ids, is_drawn)


def _asking_first(asks: jax.Array) -> _Order:
    """Returns the order in which the rows that ask come first, without a sort or a scatter."""
    count = jnp.sum(asks, dtype=jnp.int32)
    numbers = jnp.arange(len(asks), dtype=jnp.int32)
    asking = jnp.cumsum(asks, dtype=jnp.int32)  # how many ask, up to each row
    places = jnp.where(asks, asking - 1, count + numbers - asking)
    rows = jnp.sum(jnp.where(places == numbers[:, None], numbers, 0), axis=1, dtype=jnp.int32)
    return _Order(rows, places, count)


def _sampled_in_order(
    logits: jax.Array,  # f32 [num_rows, vocab_rows]
    asked: _Asked,
    count: jax.Array,
    common: _Common,
    work: Callable[[jax.Array, _Asked, _Common], tuple[jax.Array, Logprobs]],
    placement: Placement | None,
    form: Form,
) -> tuple[jax.Array, Logprobs]:
    """Samples rows of which the first `count` ask. Log-probabilities of the others are zeros."""
    num_rows, vocab_size = len(logits), common[0].tokens.shape[1]
    is_asking = jnp.arange(num_rows) < count
    # What asks is drawn below: here it takes part as the cheapest kind of row.
    temperature = jnp.where(is_asking, 0.0, asked.sampling.temperature)
    plain = replace(asked.sampling, temperature=temperature)
    token_ids = jax.lax.cond(
        count < num_rows,
        lambda logits, plain: sample_shares(logits, plain, placement, vocab_size, form),
        lambda logits, _: jnp.zeros(logits.shape[0], jnp.int32),
        logits,
        plain,
    )
    size = _block_rows(num_rows, placement, form)

    def sample_block(number: jax.Array, found: tuple[jax.Array, Logprobs]) -> tuple[jax.Array, Logprobs]:
        first = number * size
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size, axis=0)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        drawn, logprobs = apply_by_rows(work, cut(logits), jax.tree.map(cut, asked), common, placement)
        drawn = jnp.where(cut(is_asking), drawn, cut(found[0]))
        added: tuple[jax.Array, Logprobs] = jax.tree.map(put, found, (drawn, logprobs))
        return added

    nothing = token_ids, no_logprobs(num_rows, vocab_size)
    if size == num_rows:
        found: tuple[jax.Array, Logprobs] = jax.lax.cond(
            count > 0, partial(sample_block, jnp.int32(0)), lambda found: found, nothing
        )
        return found
    return _repeated(sample_block, -(-count // size), num_rows // size, nothing)


def _block_rows(num_rows: int, placement: Placement | None, form: Form) -> int:
    """Returns how many rows that ask are sampled at once; it divides `num_rows`."""
    if form is Form.GPU:  # a CUDA graph can contain branches, but no loops
        return num_rows
    num_shares = 1 if placement is None else placement.num_shares
    size = max(_TPU_BLOCK, _TPU_TILE * num_shares) if form is Form.TPU else max(_CPU_BLOCK, num_shares)
    return size if num_rows % size == 0 else num_rows


def _taken(arrays: _T, places: jax.Array) -> _T:
    taken: _T = jax.tree.map(lambda array: array[places], arrays)
    return taken


def _repeated(step: Callable[[jax.Array, _T], _T], times: jax.Array, most: int, start: _T) -> _T:
    """Applies `step` that many times, at most `most`: a bound that a plan of the program can read."""

    def is_going_on(carry: tuple[jax.Array, _T]) -> jax.Array:
        return (carry[0] < times) & (carry[0] < most)

    def go_on(carry: tuple[jax.Array, _T]) -> tuple[jax.Array, _T]:
        return carry[0] + 1, step(*carry)

    found: _T = jax.lax.while_loop(is_going_on, go_on, (jnp.int32(0), start))[1]
    return found


def _sample_whole_rows(
    shares: jax.Array, asked: _Asked, common: _Common, *, form: Form, raw_logprobs: bool
) -> tuple[jax.Array, Logprobs]:
    sampling, rows, last_draft, num_drafts, masks = asked
    state, draft_ids = common
    drafts = SeenDrafts(draft_ids, last_draft, num_drafts)
    vocab_size = state.tokens.shape[1]
    raw = logits = joined(shares, vocab_size)
    is_sound = survey(logits, form).is_sound
    logits = adjust(logits, rows, state, sampling.output_index, drafts, form)
    if masks is not None:
        logits = jax.lax.cond(jnp.any(masks != -1), masked, lambda logits, _: logits, logits, masks)
    token_ids = sample(logits[None], sampling, vocab_size, form, is_sound=is_sound)
    token_ids = jnp.where((rows.target >= 0) & is_sound, rows.target, token_ids)
    return token_ids, logprobs_of(raw if raw_logprobs else logits, token_ids, rows.is_scored)


def behind_right_drafts(is_drawn: jax.Array, rows: ExtendedRows, token_ids: jax.Array) -> jax.Array:
    """Returns `is_drawn` without the rows that follow a draft other than the token drawn in its place."""
    is_wrong = (rows.draft >= 0) & (rows.draft != jnp.roll(token_ids, 1))
    return is_drawn & ~jnp.any(_drafts_before(rows) & is_wrong, axis=-1)


def seen_drafts(rows: ExtendedRows) -> SeenDrafts:
    places = jnp.arange(len(rows.draft), dtype=jnp.int32)
    return SeenDrafts(rows.draft, places, jnp.sum(_drafts_before(rows), axis=-1, dtype=jnp.int32))


def _drafts_before(rows: ExtendedRows) -> jax.Array:
    """Returns which drafts, by the last axis, come before a row in the same sequence, bool `[num_rows, num_rows]`."""
    is_same = rows.slot[:, None] == rows.slot
    return jnp.tril(is_same) & (rows.draft >= 0) & (rows.draft >= 0)[:, None]


def _with_drafts(tokens: jax.Array, drafts: SeenDrafts, form: Form) -> jax.Array:
    """Returns the token words `[num_rows, vocab]` with the drafts counted that each row sees."""
    # Each scatter would cost a TPU's compiler many seconds.
    count = _with_all_drafts if form is Form.GPU else _with_one_draft_after_another
    return count(tokens, drafts)


def _with_one_draft_after_another(tokens: jax.Array, drafts: SeenDrafts) -> jax.Array:
    ids = jnp.arange(tokens.shape[-1], dtype=jnp.int32)

    def add(back: jax.Array, tokens: jax.Array) -> jax.Array:
        draft = jnp.where(back < drafts.num_seen, drafts.ids[drafts.last - back], NO_DRAFT)
        return tokens + jnp.where(draft[:, None] == ids, GENERATED, 0)

    counted: jax.Array = jax.lax.fori_loop(0, jnp.max(drafts.num_seen), add, tokens)
    return counted


def _with_all_drafts(tokens: jax.Array, drafts: SeenDrafts) -> jax.Array:
    """Counts all drafts at once, in a matmul of zeros and ones, which is exact: a CUDA graph can contain no loops."""
    back = drafts.last[:, None] - jnp.arange(len(drafts.ids))
    is_seen = (back >= 0) & (back < drafts.num_seen[:, None])
    is_draft = drafts.ids[:, None] == jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    counts = is_seen.astype(jnp.float32) @ is_draft.astype(jnp.float32)
    return tokens + GENERATED * counts.astype(jnp.int32)


def adjust(
    logits: jax.Array,
    rows: ExtendedRows,
    state: SamplingState,
    output_index: jax.Array,
    drafts: SeenDrafts,
    form: Form = Form.XLA,
) -> jax.Array:
    """Applies penalties, biases and restrictions to logits `[num_rows, vocab]`, those that a row asks for.

    Forbidden tokens get NEVER, whatever their bias; all others stay above it.
    """
    logits = jax.lax.cond(
        jnp.any(rows.is_adjusted),
        partial(_penalised, form=form),
        lambda logits, *_: logits,
        logits,
        rows,
        state,
        output_index,
        drafts,
    )
    adjusted: jax.Array = jax.lax.cond(jnp.any(rows.is_biased), _biased, lambda logits, *_: logits, logits, rows, state)
    return adjusted


def _penalised(
    logits: jax.Array,
    rows: ExtendedRows,
    state: SamplingState,
    output_index: jax.Array,
    drafts: SeenDrafts,
    form: Form,
) -> jax.Array:
    """Applies penalties and `min_tokens`, in one pass.

    Repetition is penalised as in CTRL (Keskar et al., arXiv 1909.05858), over prompt and output; presence and frequency
    as in OpenAI's API, over the output alone.
    """
    tokens = rows_of(state.tokens, rows.slot).astype(jnp.int32)
    tokens = jax.lax.cond(
        jnp.any(drafts.num_seen > 0), partial(_with_drafts, form=form), lambda tokens, _: tokens, tokens, drafts
    )
    counts = tokens // GENERATED
    is_seen = (counts > 0) | (tokens & IN_PROMPT > 0)
    is_blocked = (tokens & STOPS > 0) & (output_index < rows.min_tokens)[:, None]
    penalty = rows.repetition_penalty[:, None]
    adjusted = jnp.where(is_seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    adjusted = adjusted - rows.presence_penalty[:, None] * (counts > 0) - rows.frequency_penalty[:, None] * counts
    return _where_asked(rows.is_adjusted, adjusted, logits, is_blocked)


def _biased(logits: jax.Array, rows: ExtendedRows, state: SamplingState) -> jax.Array:
    bias = rows_of(state.bias, rows.slot)
    is_forbidden = (bias < NEVER / 2) | ((logits == NEVER) & rows.is_adjusted[:, None])  # the latter by `_penalised`
    return _where_asked(rows.is_biased, logits + bias, logits, is_forbidden)


def _where_asked(asked: jax.Array, adjusted: jax.Array, logits: jax.Array, is_forbidden: jax.Array) -> jax.Array:
    bounded = jnp.clip(adjusted, -_LARGEST, _LARGEST)
    adjusted = jnp.where(is_forbidden | ~(logits > -jnp.inf), NEVER, bounded)
    return jnp.where(asked[:, None], adjusted, logits)


def masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Sets tokens to NEVER whose bit in i32 `masks` `[num_rows, mask_words]` is 0: bit b of word w is 32 * w + b."""
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[-1]] > 0, logits, NEVER)
