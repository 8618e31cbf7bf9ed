"""Online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), in powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from penstock.engine.attention.triton.pages import masked_load
from penstock.engine.kernels.pallas import Ref

SoftmaxState = tuple[
    jax.Array, jax.Array, jax.Array
]  # running maximum [rows], sum [rows], weighted values [rows, width]

_NEVER = -1e30  # finite: a row that sees nothing stays free of NaN
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class MaskedScores:
    """The function from the dot product of query and key to a score, and which keys a query sees."""

    scale: float
    soft_cap: float | None
    sliding_window: int | None

    def of(self, dots: jax.Array) -> jax.Array:
        """Returns scores times log2(e), so that weights are powers of two: the hardware has an instruction
        for those.
        """
        if self.soft_cap is None:
            return dots * (self.scale * _LOG2_E)
        return jnp.tanh(dots * (self.scale / self.soft_cap)) * (self.soft_cap * _LOG2_E)

    def sees(self, position: jax.Array, key: jax.Array) -> jax.Array:
        visible = key <= position
        if self.sliding_window is not None:
            visible &= key > position - self.sliding_window
        return visible


def empty_softmax(
    width: int,
    sinks: Ref | None,  # f32 [num_heads]: scores of a key without a value, which a row sees first
    head: jax.Array,  # i32 [rows]
    has_head: jax.Array | None = None,  # bool [rows]; None: all rows have one
    *,
    is_first: jax.Array | bool = True,  # otherwise the result is joined with one that has the sinks
) -> SoftmaxState:
    top, total = jnp.full(head.shape, _NEVER, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    if sinks is not None:
        seen = masked_load(sinks.at[head], has_head) * _LOG2_E
        top, total = jnp.where(is_first, seen, top), jnp.where(is_first, 1.0, total)
    return top, total, jnp.zeros((*head.shape, width), jnp.float32)


def take_keys(
    carry: SoftmaxState,
    q: jax.Array,  # [rows, width]
    k: jax.Array,  # [keys, width]
    v: jax.Array,  # [keys, width]
    scores: MaskedScores,
    visible: jax.Array | None,  # [rows, keys]; None: all
) -> SoftmaxState:
    """Adds a block of keys.

    A row that has not seen any key yet accumulates values that are hidden from it. They vanish with the first key that
    it sees, because everything before is then multiplied by 2 ** -1e30.
    """
    top, total, values = carry
    score = scores.of(_matmul(q, k, transpose=True))
    if visible is not None:
        score = jnp.where(visible, score, _NEVER)
    new_top = jnp.maximum(top, jnp.max(score, axis=1))
    weights = jnp.exp2(score - new_top[:, None])
    correction = jnp.exp2(top - new_top)
    new_total = total * correction + jnp.sum(weights, axis=1)
    return new_top, new_total, values * correction[:, None] + _matmul(weights.astype(v.dtype), v)


def result(carry: SoftmaxState) -> jax.Array:
    """Returns the result, f32 [rows, width]."""
    _, total, values = carry
    return values / jnp.maximum(total, 1e-30)[:, None]


def log_weight(carry: SoftmaxState) -> jax.Array:
    """Returns the log2 of a result's weight beside results over other keys, [rows]."""
    top, total, _ = carry
    return top + jnp.log2(jnp.maximum(total, 1e-30))


def _matmul(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """Multiplies in f32; with `transpose`, `b` is transposed."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
