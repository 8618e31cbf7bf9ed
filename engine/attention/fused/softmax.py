"""Online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), one KV head at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.layout import HeadLayout
from penstock.engine.kernels.pallas import Ref

Int = jax.Array | int

NEVER = -1e30  # finite: a row that sees nothing stays free of NaN


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """The function from the dot product of query and key to a score."""

    scale: float
    soft_cap: float | None


class KeyBlock(NamedTuple):
    """Keys and values of a KV head, in VMEM."""

    rows: Ref  # [keys, width]
    scales: Ref | None  # f32 [2, keys]: the factors of the rows' keys, and of their values


@dataclass(frozen=True, slots=True)
class Softmax:
    """The running state of all KV heads."""

    layout: HeadLayout
    scores: ScoreFunction
    sinks: Ref | None  # f32 [num_kv_heads, decode rows, LANES], the same in all lanes: scores of a key without a value
    num_queries: int | None  # number of tokens, if rows are heads times tokens; None: rows are those of sinks
    top: Ref  # f32 [num_kv_heads, rows, LANES], the same in all lanes
    total: Ref  # f32 [num_kv_heads, rows, LANES], the same in all lanes
    values: Ref  # f32 [num_kv_heads, rows, query width]

    def start(self) -> None:
        self.total[...] = jnp.full_like(self.total, 0.0 if self.sinks is None else 1.0)
        self.values[...] = jnp.zeros_like(self.values)
        if self.sinks is None:
            self.top[...] = jnp.full_like(self.top, NEVER)
        elif self.num_queries is None:
            self.top[...] = self.sinks[...]
        else:
            self._start_tokens(self.sinks, self.num_queries)

    def _start_tokens(self, sinks: Ref, num_queries: int) -> None:
        shape = (self.top.shape[1], sinks.shape[1])
        is_own = lax.broadcasted_iota(jnp.int32, shape, 0) // num_queries == lax.broadcasted_iota(jnp.int32, shape, 1)
        place = jnp.where(is_own, 1.0, 0.0)

        def start(head: Int) -> None:
            self.top[head] = place_rows(place, sinks[head])

        each_head(sinks.shape[0], 1, start)

    def take(
        self,
        head: Int,
        q: jax.Array,  # [rows, query width]
        block: KeyBlock,
        visible: jax.Array,  # [rows, keys]
    ) -> None:
        """Adds a block of keys."""
        half, scores, kv = self.layout.half, self.scores, block.rows
        k = kv[...] if self.layout.is_packed else kv[:, :half]
        v = k if self.layout.is_packed else kv[:, half:]
        score = _matmul(q, k.astype(q.dtype), contract_lanes=True) * scores.scale
        if block.scales is not None:
            score = score * block.scales[0:1, :]
        if scores.soft_cap is not None:
            score = scores.soft_cap * jnp.tanh(score / scores.soft_cap)
        score = jnp.where(visible, score, NEVER)
        top = self.top[head]
        new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(score - new_top[:, :1]), 0.0)
        correction = jnp.exp(top - new_top)
        self.top[head] = new_top
        self.total[head] = self.total[head] * correction + jnp.sum(weights, axis=1, keepdims=True)
        if block.scales is not None:
            weights = weights * block.scales[1:2, :]
        update = _matmul(weights.astype(q.dtype), v.astype(q.dtype))
        self.values[head] = self.values[head] * correction[:, :1] + update

    def result(self, head: Int) -> jax.Array:
        """Returns the head's result, f32 [rows, query width]."""
        total = jnp.maximum(self.total[head][:, :1], 1e-30)
        result: jax.Array = self.values[head] * (1.0 / total)
        return result


def each_head(num_heads: int, at_once: int, work: Callable[[Int], None]) -> None:
    """Calls `work` for all heads, unrolled by `at_once`."""

    def run(i: Int, _: None) -> None:
        for j in range(at_once):
            work(i * at_once + j)

    lax.fori_loop(0, num_heads // at_once, run, None)


def aligned(value: Int, multiple: int) -> jax.Array:
    """Returns `value`, marked for the compiler as a multiple of `multiple`."""
    return pl.multiple_of(jnp.asarray(value, jnp.int32), multiple)


def place_rows(place: jax.Array, rows: jax.Array) -> jax.Array:
    """Moves rows to where the ones of a matrix of ones and zeros are; exact, in f32."""
    return _matmul(place, rows)


def place_lanes(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Moves each token's lane of `rows` [n, tokens] to where `place` [lanes, tokens] has its one; exact, in f32."""
    return _matmul(rows, place, contract_lanes=True)


def _matmul(a: jax.Array, b: jax.Array, *, contract_lanes: bool = False) -> jax.Array:
    """Multiplies in f32; with `contract_lanes`, `b` is transposed."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if contract_lanes else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
