"""Log-probabilities of a distribution over tokens: of the adjusted one, after penalties, biases and masks and before
temperature and filters, or of the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from penstock.engine.execution.sampling.blocks_kernel import fetch_blocks
from penstock.engine.execution.sampling.sampling_state import LANES
from penstock.parameters import MAX_LOGPROBS


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


def logprobs_of(
    logits: jax.Array, token_ids: jax.Array, is_scored: jax.Array, maxima: jax.Array | None = None
) -> Logprobs:
    """Returns those of the drawn and the most likely tokens, for the rows of `[num_rows, vocab]` to be scored.

    `maxima` are those of each LANES logits, if they are known; more blocks may follow, of minus infinity.
    """
    nothing = no_logprobs(*logits.shape)
    score = _score if maxima is None else partial(_score_by_maxima, maxima=maxima)
    found: Logprobs = jax.lax.cond(jnp.any(is_scored), score, lambda *_: nothing, logits, token_ids)
    asked: Logprobs = jax.tree.map(
        lambda rows: jnp.where(is_scored.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0), found
    )
    return asked


def _score(logits: jax.Array, token_ids: jax.Array) -> Logprobs:
    return jax.vmap(_score_row)(logits, token_ids)


def _score_row(logits: jax.Array, token_id: jax.Array) -> Logprobs:  # f32 [vocab], i32 []
    total = jax.nn.logsumexp(logits)
    top, top_ids = _top(logits, min(MAX_LOGPROBS, logits.shape[0]))
    return Logprobs(logits[token_id] - total, top_ids, top - total)


def _top(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest values of a row, in order, and their indices; among equal ones the first.

    They are in the blocks with the largest maxima, which are found much sooner. Blocks stay in order, for ties.
    """
    blocks = jnp.pad(logits, (0, -len(logits) % LANES), constant_values=-jnp.inf).reshape(-1, LANES)
    if len(blocks) <= count:
        top, top_ids = jax.lax.top_k(logits, count)
        return top, top_ids
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=1), count)
    chosen = jnp.sort(chosen)
    top, places = jax.lax.top_k(blocks[chosen].reshape(-1), count)
    return top, chosen[places // LANES] * LANES + places % LANES


def _score_by_maxima(logits: jax.Array, token_ids: jax.Array, *, maxima: jax.Array, interpret: Any = False) -> Logprobs:
    """Scores rows without looking for the maxima of their blocks, and without another layout of the logits."""
    count = min(MAX_LOGPROBS, logits.shape[1])
    maxima = maxima[:, : -(-logits.shape[1] // LANES)]
    highest = jnp.max(maxima, axis=1, keepdims=True)
    totals = highest + jnp.log(jnp.sum(jnp.exp(logits - highest), axis=1, keepdims=True))
    chosen = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[1]))[1], axis=1)
    sampled = jnp.maximum(token_ids, 0)[:, None]
    fetched = fetch_blocks(logits, jnp.concatenate([sampled // LANES, chosen], axis=1), interpret=interpret)
    of_sampled = jnp.sum(jnp.where(jnp.arange(LANES) == sampled % LANES, fetched[:, 0], 0), axis=1)
    top, places = jax.lax.top_k(fetched[:, 1:].reshape(len(logits), -1), count)
    top_ids = jnp.take_along_axis(chosen, places // LANES, axis=1) * LANES + places % LANES
    return Logprobs(of_sampled - totals[:, 0], top_ids, top - totals)
