"""What decoding and prefill compute from a block of keys: scores, and sums of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import SUBLANES, HeadLayout, HeadTiles
from penstock.engine.kernels.pallas import Ref

Int = jax.Array | int

NEVER = -1e30  # finite: a row that sees nothing stays free of NaN


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """The function from the dot product of query and key to a score."""

    scale: float
    soft_cap: float | None

    def products(self, q: jax.Array, k: jax.Array, block: KeyBlock) -> jax.Array:
        """Returns the scores of `q` [rows, query width] for a block's keys `k` before the cap: f32 [rows, keys]."""
        score, factors = matmul(q, k, contract_lanes=True) * self.scale, block.factors(0)
        return score if factors is None else score * factors

    def capped(self, score: jax.Array) -> jax.Array:
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)

    def transposed(self, q: jax.Array, k: jax.Array, block: KeyBlock, factor: float) -> jax.Array:
        """Returns the scores times `factor`: f32 [keys, rows]."""
        score, factors = matmul(k, q, contract_lanes=True), block.factors(0)
        scale = self.scale * factor if self.soft_cap is None else self.scale / self.soft_cap
        score = score * (scale if factors is None else as_column(factors * scale))
        return score if self.soft_cap is None else self.soft_cap * factor * jnp.tanh(score)


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


def as_column(row: jax.Array) -> jax.Array:
    """Transposes f32 [1, keys] to [keys, 1]."""
    return jnp.transpose(jnp.broadcast_to(row, (SUBLANES, row.shape[1])))[:, :1]


def matmul(a: jax.Array, b: jax.Array, *, contract_lanes: bool = False, contract_rows: bool = False) -> jax.Array:
    """Multiplies in f32; with `contract_lanes`, `b` is transposed, and with `contract_rows`, `a`."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((0 if contract_rows else 1,), (1 if contract_lanes else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
