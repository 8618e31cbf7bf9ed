"""Softmax of decoding: a block of keys is summed up by itself, then joined to what its sequence has so far.

So the sums of a sequence are taken in a fixed order, that of its own blocks, whatever is computed beside them. And
blocks that are computed together do not wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from penstock.engine.attention.fused.layout import LANES, HeadLayout, HeadTiles
from penstock.engine.attention.fused.pages import PageBuffers
from penstock.engine.attention.fused.softmax import NEVER, HeadSinks, Int, ScoreFunction, each_head, weighted_sum
from penstock.engine.attention.fused.token_rows import TokenRows
from penstock.engine.kernels.pallas import Ref


class Attended(NamedTuple):
    """A block of keys in a buffer, and the token that attends to it."""

    slot: Int
    row: Int  # the token's, in the block of tokens
    is_first: Int  # whether it is the first of the token's blocks
    first: Int | None  # the first visible key of the block; may be negative. None: 0
    end: Int  # the end of the visible keys; may lie beyond the block


class Sums(NamedTuple):
    """Softmax over some keys, for a tile of heads."""

    top: jax.Array  # f32 [rows, LANES], the same in all lanes
    total: jax.Array  # f32 [rows, LANES], the same in all lanes
    values: jax.Array  # f32 [rows, query width]


@dataclass(frozen=True, slots=True)
class DecodeSoftmax:
    layout: HeadLayout
    scores: ScoreFunction
    sinks: HeadSinks | None
    tiles: HeadTiles
    tiles_at_once: int
    kv: PageBuffers
    rows: TokenRows
    top: Ref  # f32 [tiles, rows, LANES], the same in all lanes: what the last sequence has so far
    total: Ref  # f32 [tiles, rows, LANES], the same in all lanes
    values: Ref  # f32 [tiles, rows, query width]

    def attend(self, blocks: list[Attended]) -> None:
        """Adds blocks of keys, in order. After each one, its token's result so far is written to the token's rows."""
        each_head(self.tiles.num, self.tiles_at_once, lambda tile: self._attend(tile, blocks))

    def _attend(self, tile: Int, blocks: list[Attended]) -> None:
        parts = [self._sums(tile, block) for block in blocks]
        start = self._start(tile)
        so_far = Sums(self.top[tile], self.total[tile], self.values[tile])
        for block, part in zip(blocks, parts, strict=True):
            so_far = _joined(
                Sums(*(jnp.where(block.is_first, new, old) for new, old in zip(start, so_far, strict=True))), part
            )
            self.rows.put_result(tile, block.row, _scaled(so_far.values, 1.0 / jnp.maximum(so_far.total, 1e-30)))
        self.top[tile], self.total[tile], self.values[tile] = so_far

    def _start(self, tile: Int) -> Sums:
        """Returns the sums of a sequence before its first block."""
        shape = (self.tiles.rows, LANES)
        values = jnp.zeros((self.tiles.rows, self.layout.query_width), jnp.float32)
        if self.sinks is None:
            return Sums(jnp.full(shape, NEVER, jnp.float32), jnp.zeros(shape, jnp.float32), values)
        return Sums(self.sinks.rows[tile], jnp.ones(shape, jnp.float32), values)

    def _sums(self, tile: Int, block: Attended) -> Sums:
        """Sums up a block by itself.

        The tile's KV heads share its rows. In the rows of the other heads, a head's queries and weights are 0, so that
        what is added there leaves the sums as they are.
        """
        q = self.rows.query(tile, block.row)
        row = lax.broadcasted_iota(jnp.int32, (self.tiles.rows, 1), 0)
        heads, dtype = [], self.rows.tokens.q.dtype
        for place in range(self.tiles.heads):
            first = place * self.tiles.group
            is_own = (row >= first) & (row < first + self.tiles.group)
            keys = self.kv.keys_of(block.slot, tile * self.tiles.heads + place)
            heads.append((is_own, keys, *keys.halves(self.layout, dtype)))

        def own(is_own: jax.Array, x: jax.Array) -> jax.Array:
            return x if len(heads) == 1 else jnp.where(is_own, x, 0.0)

        products = [self.scores.products(own(is_own, q).astype(dtype), k, keys) for is_own, keys, k, _ in heads]
        key = lax.broadcasted_iota(jnp.int32, (1, self.kv.sizes.keys), 1)
        visible = key < block.end if block.first is None else (key < block.end) & (key >= block.first)
        score = jnp.where(visible, self.scores.capped(sum(products[1:], start=products[0])), NEVER)
        top = jnp.max(score, axis=1, keepdims=True)
        weights = jnp.exp(score - top)
        values = [weighted_sum(own(is_own, weights), v, keys) for is_own, keys, _, v in heads]
        shape = (self.tiles.rows, LANES)
        top, total = (jnp.broadcast_to(x, shape) for x in (top, jnp.sum(weights, axis=1, keepdims=True)))
        return Sums(top, total, sum(values[1:], start=values[0]))


def _joined(a: Sums, b: Sums) -> Sums:
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Sums(top, a.total * of_a + b.total * of_b, _scaled(a.values, of_a) + _scaled(b.values, of_b))


def _scaled(values: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies `values` by a factor of each row, [rows, LANES], the same in all lanes."""
    return values * jnp.concatenate([factor] * (values.shape[1] // LANES), axis=1)
