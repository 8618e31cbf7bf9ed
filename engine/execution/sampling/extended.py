"""Sampling with all options: penalties, biases, restrictions, masks and log-probabilities.

The rows that ask for none are sampled first. Then those that ask are sampled, a few at a time, so that a step costs
what they cost, however many others there are. An option that none of them asks for is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.adjust_kernel import Adjusted, adjust_by_kernel
from penstock.engine.execution.sampling.adjusting import adjust, masked
from penstock.engine.execution.sampling.extended_rows import ExtendedRows, SeenDrafts, behind_right_drafts, seen_drafts
from penstock.engine.execution.sampling.logprobs import Logprobs, logprobs_of, no_logprobs
from penstock.engine.execution.sampling.sampling import Form, joined, sample, survey
from penstock.engine.execution.sampling.sampling_state import SamplingState, counted
from penstock.engine.execution.sampling.vocab_shares import apply_by_rows, sample_shares
from penstock.engine.execution.sampling_rows import SamplingRows
from penstock.engine.sharding.placement import Placement

_TPU_TILE = 8  # rows: a device takes as long for fewer
_CPU_BLOCK = 4

_T = TypeVar("_T")


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
    """Samples rows; only the first `count` use options. Log-probabilities of the others are zeros."""
    num_rows, vocab_size = len(logits), common[0].vocab_size
    is_asking = jnp.arange(num_rows) < count
    # Rows with options are drawn below; here they count as the cheapest kind.
    temperature = jnp.where(is_asking, 0.0, asked.sampling.temperature)
    plain = replace(asked.sampling, temperature=temperature)
    token_ids = jax.lax.cond(
        count < num_rows,
        lambda logits, plain: sample_shares(logits, plain, placement, vocab_size, form),
        lambda logits, _: jnp.zeros(logits.shape[0], jnp.int32),
        logits,
        plain,
    )
    size = rows_at_once(num_rows, placement, form)

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


def rows_at_once(num_rows: int, placement: Placement | None, form: Form) -> int:
    """Returns how many rows that ask are sampled at once; it divides `num_rows`."""
    if form is Form.GPU:  # a CUDA graph can contain branches, but no loops
        return num_rows
    num_shares = 1 if placement is None else placement.num_shares
    size = _TPU_TILE * num_shares if form is Form.TPU else max(_CPU_BLOCK, num_shares)
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
    vocab_size = state.vocab_size
    raw = joined(shares, vocab_size)
    found = _adjusted(raw, rows, state, sampling.output_index, drafts, masks, form, raw_maxima=raw_logprobs)
    token_ids = sample(found.logits[None], sampling, vocab_size, form, is_sound=found.is_sound)
    token_ids = jnp.where((rows.target >= 0) & found.is_sound, rows.target, token_ids)
    return token_ids, logprobs_of(raw if raw_logprobs else found.logits, token_ids, rows.is_scored, found.maxima)


def _adjusted(
    logits: jax.Array,
    rows: ExtendedRows,
    state: SamplingState,
    output_index: jax.Array,
    drafts: SeenDrafts,
    masks: jax.Array | None,
    form: Form,
    *,
    raw_maxima: bool,
) -> Adjusted:
    if form is Form.TPU:
        return adjust_by_kernel(logits, rows, state, output_index, drafts, masks, raw_maxima=raw_maxima)
    is_sound = survey(logits, form).is_sound
    logits = adjust(logits, rows, state, output_index, drafts, form)
    if masks is not None:
        logits = jax.lax.cond(jnp.any(masks != -1), masked, lambda logits, _: logits, logits, masks)
    return Adjusted(logits, is_sound, None)
