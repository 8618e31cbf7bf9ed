"""What penalties, biases, restrictions and masks do to logits, in XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.extended_rows import NO_DRAFT, ExtendedRows, SeenDrafts
from penstock.engine.execution.sampling.sampling import Form
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, STOPS, SamplingState, rows_of
from penstock.engine.execution.sampling_rows import NEVER

LARGEST = 1e29
"""Bound on adjusted logits in absolute value: none comes near NEVER."""


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
    tokens = rows_of(state.tokens, rows.slot)[:, : state.vocab_size]
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
    bias = rows_of(state.bias, rows.slot)[:, : state.vocab_size]
    is_forbidden = (bias < NEVER / 2) | ((logits == NEVER) & rows.is_adjusted[:, None])  # the latter by `_penalised`
    return _where_asked(rows.is_biased, logits + bias, logits, is_forbidden)


def _where_asked(asked: jax.Array, adjusted: jax.Array, logits: jax.Array, is_forbidden: jax.Array) -> jax.Array:
    bounded = jnp.clip(adjusted, -LARGEST, LARGEST)
    adjusted = jnp.where(is_forbidden | ~(logits > -jnp.inf), NEVER, bounded)
    return jnp.where(asked[:, None], adjusted, logits)


def masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Sets tokens to NEVER whose bit in i32 `masks` `[num_rows, mask_words]` is 0: bit b of word w is 32 * w + b."""
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[-1]] > 0, logits, NEVER)


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
