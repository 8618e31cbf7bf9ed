"""Sampling with all options: penalties, biases, restrictions, masks and log-probabilities.

A step skips every option that none of its rows asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.logprobs import Logprobs, logprobs_of
from penstock.engine.execution.sampling.sampling import Form, joined, sample, survey
from penstock.engine.execution.sampling.sampling_rows import NEVER, SamplingRows
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, STOPS, SamplingState, counted
from penstock.engine.execution.sampling.vocab_shares import apply_by_rows
from penstock.engine.sharding.placement import Placement

NO_TARGET = -1
NO_DRAFT = -1

_LARGEST = 1e29  # bound on adjusted logits in absolute value: none comes near NEVER


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExtendedRows:
    """Options of each row that only some requests ask for; their tokens and lists are in the slot's state."""

    slot: jax.Array  # i32 [num_rows]
    is_adjusted: jax.Array  # bool [num_rows]: whether the rest, except the target, means anything
    repetition_penalty: jax.Array  # f32 [num_rows]
    presence_penalty: jax.Array  # f32 [num_rows]
    frequency_penalty: jax.Array  # f32 [num_rows]
    min_tokens: jax.Array  # i32 [num_rows]: no stop token before that output index
    target: jax.Array  # i32 [num_rows]: the token to score, for a row that samples none; else NO_TARGET
    draft: jax.Array  # i32 [num_rows]: the draft before it, for an adjusted row; else NO_DRAFT
    is_scored: jax.Array  # bool [num_rows]: whether it wants log-probabilities

    @property
    def is_penalised(self) -> jax.Array:
        """Whether what a row samples changes what it samples next."""
        has_penalty = self.repetition_penalty != 1.0
        has_penalty |= (self.presence_penalty != 0.0) | (self.frequency_penalty != 0.0)
        return self.is_adjusted & has_penalty


class SeenDrafts(NamedTuple):
    """The drafts of a step, and which of them each row sees as if they had been generated."""

    ids: jax.Array  # i32 [num_drafts]; NO_DRAFT if a place has none
    is_seen: jax.Array  # bool [num_rows, num_drafts]


class _Asked(NamedTuple):
    """The inputs that belong to single rows."""

    sampling: SamplingRows
    rows: ExtendedRows
    sees: jax.Array  # as SeenDrafts.is_seen
    masks: jax.Array | None


def sample_extended(
    logits: jax.Array,  # f32 [num_rows, vocab_rows]
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
    asked = _Asked(sampling, rows, drafts.is_seen, masks)
    work = partial(_sample_whole_rows, form=form, raw_logprobs=raw_logprobs)
    token_ids, logprobs = apply_by_rows(work, logits, asked, (state, drafts.ids), placement)
    is_drawn = rows.is_penalised
    if masks is not None:
        is_drawn = jax.lax.cond(
            jnp.any(rows.draft >= 0), behind_right_drafts, lambda drawn, *_: drawn, is_drawn, rows, token_ids
        )
    return token_ids, logprobs, counted(state, rows.slot, token_ids, is_drawn)


def _sample_whole_rows(
    shares: jax.Array, asked: _Asked, common: tuple[SamplingState, jax.Array], *, form: Form, raw_logprobs: bool
) -> tuple[jax.Array, Logprobs]:
    sampling, rows, sees, masks = asked
    state, draft_ids = common
    vocab_size = state.tokens.shape[1]
    raw = logits = joined(shares, vocab_size)
    is_sound = survey(logits, form).is_sound
    drafts = SeenDrafts(draft_ids, sees)
    logits = jax.lax.cond(
        jnp.any(rows.is_adjusted), adjust, lambda logits, *_: logits, logits, rows, state, sampling.output_index, drafts
    )
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
    return SeenDrafts(rows.draft, _drafts_before(rows))


def _drafts_before(rows: ExtendedRows) -> jax.Array:
    """Returns which drafts, by the last axis, come before a row in the same sequence, bool `[num_rows, num_rows]`."""
    is_same = rows.slot[:, None] == rows.slot
    return jnp.tril(is_same) & (rows.draft >= 0) & (rows.draft >= 0)[:, None]


def _with_drafts(tokens: jax.Array, drafts: SeenDrafts) -> jax.Array:
    """Returns the token words `[num_rows, vocab]` with the drafts counted that each row sees."""
    # A matmul of zeros and ones is exact; each scatter would cost a TPU's compiler many seconds.
    is_draft = drafts.ids[:, None] == jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    counts = drafts.is_seen.astype(jnp.float32) @ is_draft.astype(jnp.float32)
    return tokens + GENERATED * counts.astype(jnp.int32)


def adjust(
    logits: jax.Array, rows: ExtendedRows, state: SamplingState, output_index: jax.Array, drafts: SeenDrafts
) -> jax.Array:
    """Applies penalties, biases and restrictions to logits `[num_rows, vocab]`, in one pass over them.

    Repetition is penalised as in CTRL (Keskar et al., arXiv 1909.05858), over prompt and output; presence and frequency
    as in OpenAI's API, over the output alone. Forbidden tokens get NEVER, whatever their bias; all others stay above
    it.
    """
    tokens, bias = state.tokens[rows.slot].astype(jnp.int32), state.bias[rows.slot]
    tokens = jax.lax.cond(jnp.any(drafts.ids >= 0), _with_drafts, lambda tokens, _: tokens, tokens, drafts)
    counts = tokens // GENERATED
    is_seen = (counts > 0) | (tokens & IN_PROMPT > 0)
    is_blocked = (tokens & STOPS > 0) & (output_index < rows.min_tokens)[:, None]
    may_be_drawn = (bias > NEVER / 2) & ~is_blocked & (logits > -jnp.inf)
    penalty = rows.repetition_penalty[:, None]
    adjusted = jnp.where(is_seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    adjusted = adjusted - rows.presence_penalty[:, None] * (counts > 0) - rows.frequency_penalty[:, None] * counts
    adjusted = jnp.where(may_be_drawn, jnp.clip(adjusted + bias, -_LARGEST, _LARGEST), NEVER)
    return jnp.where(rows.is_adjusted[:, None], adjusted, logits)


def masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Sets tokens to NEVER whose bit in i32 `masks` `[num_rows, mask_words]` is 0: bit b of word w is 32 * w + b."""
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[-1]] > 0, logits, NEVER)
