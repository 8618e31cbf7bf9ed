"""Options of rows that only some requests ask for, and the drafts that a row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_TARGET = -1
NO_DRAFT = -1

ADJUSTED = 1
BIASED = 2
"""Bits of the word that says how a row's logits change."""


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
    """The drafts of a step, and which consecutive ones each row sees as if they had been generated."""

    ids: jax.Array  # i32 [num_places]; NO_DRAFT if a place has none
    last: jax.Array  # i32 [num_rows]: the place of the last one seen
    num_seen: jax.Array  # i32 [num_rows]: how many are seen


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
