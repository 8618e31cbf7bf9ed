"""Log-probabilities of a distribution over tokens: of the adjusted one, after penalties, biases and masks and before
temperature and filters, or of the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from penstock.parameters import MAX_LOGPROBS

_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a step's rows; zeros for rows that did not ask."""

    sampled: jax.Array  # f32 [num_rows]
    top_ids: jax.Array  # i32 [num_rows, MAX_LOGPROBS], most likely first
    top: jax.Array  # f32 [num_rows, MAX_LOGPROBS]


def no_logprobs(*shape: int) -> Logprobs:
    """Returns zeros for rows of these dimensions; the last one is the vocabulary."""
    rows, width = shape[:-1], min(MAX_LOGPROBS, shape[-1])
    return Logprobs(jnp.zeros(rows), jnp.zeros((*rows, width), jnp.int32), jnp.zeros((*rows, width)))


def logprobs_of(logits: jax.Array, token_ids: jax.Array, is_scored: jax.Array) -> Logprobs:
    """Returns those of the drawn and the most likely tokens, for the rows of `[num_rows, vocab]` to be scored."""
    nothing = no_logprobs(*logits.shape)
    found: Logprobs = jax.lax.cond(jnp.any(is_scored), _score, lambda *_: nothing, logits, token_ids, is_scored)
    return found


def _score(logits: jax.Array, token_ids: jax.Array, is_scored: jax.Array) -> Logprobs:
    found = jax.vmap(_score_row)(logits, token_ids)
    asked: Logprobs = jax.tree.map(
        lambda rows: jnp.where(is_scored.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0), found
    )
    return asked


def _score_row(logits: jax.Array, token_id: jax.Array) -> Logprobs:  # f32 [vocab], i32 []
    total = jax.nn.logsumexp(logits)
    top, top_ids = _top(logits, min(MAX_LOGPROBS, logits.shape[0]))
    return Logprobs(logits[token_id] - total, top_ids, top - total)


def _top(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest values of a row, in order, and their indices; among equal ones the first.

    They are in the blocks with the largest maxima, which are found much sooner. Blocks stay in order, for ties.
    """
    blocks = jnp.pad(logits, (0, -len(logits) % _BLOCK), constant_values=-jnp.inf).reshape(-1, _BLOCK)
    if len(blocks) <= count:
        top, top_ids = jax.lax.top_k(logits, count)
        return top, top_ids
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=1), count)
    chosen = jnp.sort(chosen)
    top, places = jax.lax.top_k(blocks[chosen].reshape(-1), count)
    return top, chosen[places // _BLOCK] * _BLOCK + places % _BLOCK
