"""Online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), one KV head at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import HeadLayout, HeadTiles
from penstock.engine.kernels.pallas import Ref

Int = jax.Array | int

NEVER = -1e30  # finite: a row that sees nothing stays free of NaN


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """The function from the dot product of query and key to a score."""

    scale: float
    soft_cap: float | None

    def of(self, q: jax.Array, k: jax.Array, block: KeyBlock) -> jax.Array:
        """Returns the scores of `q` [rows, query width] for a block's keys `k`: f32 [rows, keys]."""
        return self.capped(self.products(q, k, block))

    def products(self, q: jax.Array, k: jax.Array, block: KeyBlock) -> jax.Array:
        """Returns the scores before the cap."""
        score, factors = matmul(q, k, contract_lanes=True) * self.scale, block.factors(0)
        return score if factors is None else score * factors

    def capped(self, score: jax.Array) -> jax.Array:
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)


class KeyBlock(NamedTuple):
    """Keys and values of a KV head, in VMEM."""

    rows: Ref  # [pieces, rows, width]
    scales: Ref | None  # f32 [pieces, 2, rows]: the factors of the rows' keys, and of their values
    elements: PageElements

    def halves(self, layout: HeadLayout, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values for matmuls in `dtype`, each [keys, lanes]; packed, both are the whole rows."""
        if layout.is_packed:
            k = v = self.rows[...]
        else:
            k, v = self.rows[:, :, : layout.half], self.rows[:, :, layout.half :]
        k, v = (self.elements.converted(x.reshape(-1, x.shape[2]), dtype) for x in (k, v))
        return k, v

    def factors(self, of_values: int) -> jax.Array | None:
        """Returns the factors of keys, or with 1 of values: f32 [1, keys]."""
        if self.scales is None:
            return None
        pieces = [self.scales[i, of_values : of_values + 1, :] for i in range(self.scales.shape[0])]
        factors = jnp.concatenate(pieces, axis=1)
        return factors if self.elements.factor == 1 else factors * self.elements.factor


@dataclass(frozen=True, slots=True)
class Softmax:
    """The running state of all KV heads in prefill. A head's rows are its query heads times the block's tokens."""

    layout: HeadLayout
    scores: ScoreFunction
    sinks: HeadSinks | None
    num_queries: int  # tokens in a block
    top: Ref  # f32 [num_kv_heads, rows, LANES], the same in all lanes
    total: Ref  # f32 [num_kv_heads, rows, LANES], the same in all lanes
    values: Ref  # f32 [num_kv_heads, rows, query width]

    def start(self) -> None:
        self.total[...] = jnp.full_like(self.total, 0.0 if self.sinks is None else 1.0)
        self.values[...] = jnp.zeros_like(self.values)
        if self.sinks is None:
            self.top[...] = jnp.full_like(self.top, NEVER)
        else:
            self._start_at(self.sinks)

    def _start_at(self, sinks: HeadSinks) -> None:
        tiles = sinks.tiles
        shape = (self.top.shape[1], tiles.rows)
        query_head = lax.broadcasted_iota(jnp.int32, shape, 0) // self.num_queries
        row = lax.broadcasted_iota(jnp.int32, shape, 1)

        def start(head: Int) -> None:
            place = jnp.where(query_head == row - head % tiles.heads * tiles.group, 1.0, 0.0)
            self.top[head] = place_rows(place, sinks.rows[head // tiles.heads])

        each_head(tiles.num_heads, 1, start)

    def take(
        self,
        head: Int,
        q: jax.Array,  # [rows, query width]
        block: KeyBlock,
        visible: jax.Array,  # [rows, keys]
    ) -> None:
        """Adds a block of keys."""
        k, v = block.halves(self.layout, q.dtype)
        score = jnp.where(visible, self.scores.of(q, k, block), NEVER)
        top = self.top[head]
        new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(score - new_top[:, :1]), 0.0)
        correction = jnp.exp(top - new_top)
        self.top[head] = new_top
        self.total[head] = self.total[head] * correction + jnp.sum(weights, axis=1, keepdims=True)
        update = weighted_sum(weights, v, block)
        self.values[head] = self.values[head] * correction[:, :1] + update

    def result(self, head: Int) -> jax.Array:
        """Returns the head's result, f32 [rows, query width]."""
        total = jnp.maximum(self.total[head][:, :1], 1e-30)
        result: jax.Array = self.values[head] * (1.0 / total)
        return result


class HeadSinks(NamedTuple):
    """Scores of a key without a value, for each query head."""

    rows: Ref  # f32 [tiles, rows, LANES], the same in all lanes
    tiles: HeadTiles


def weighted_sum(weights: jax.Array, v: jax.Array, block: KeyBlock) -> jax.Array:
    """Sums a block's values `v` with f32 `weights` [rows, keys], multiplied in their type."""
    factors = block.factors(1)
    if factors is not None:
        weights = weights * factors
    return matmul(weights.astype(v.dtype), v)


def each_head(num_heads: int, at_once: int, work: Callable[[Int], None]) -> None:
    """Calls `work` for all heads, unrolled by `at_once`."""

    def run(heads: list[Int]) -> None:
        for head in heads:
            work(head)

    heads_together(num_heads, at_once, run)


def heads_together(num_heads: int, at_once: int, work: Callable[[list[Int]], None]) -> None:
    """Calls `work` for all heads, `at_once` of them each time."""
    lax.fori_loop(0, num_heads // at_once, lambda i, _: work([i * at_once + j for j in range(at_once)]), None)


def aligned(value: Int, multiple: int) -> jax.Array:
    """Returns `value`, marked for the compiler as a multiple of `multiple`."""
    return pl.multiple_of(jnp.asarray(value, jnp.int32), multiple)


def place_rows(place: jax.Array, rows: jax.Array) -> jax.Array:
    """Moves rows to where the ones of a matrix of ones and zeros are; exact, in f32."""
    return matmul(place, rows)


def place_lanes(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Moves each token's lane of `rows` [n, tokens] to where `place` [lanes, tokens] has its one; exact, in f32."""
    return matmul(rows, place, contract_lanes=True)


def matmul(a: jax.Array, b: jax.Array, *, contract_lanes: bool = False) -> jax.Array:
    """Multiplies in f32; with `contract_lanes`, `b` is transposed."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if contract_lanes else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
