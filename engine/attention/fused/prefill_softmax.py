"""Online softmax of prefill (Milakov and Gimelshein, arXiv 1805.02867), over parts of a block of keys.

Scores are transposed: keys lie on the sublanes and query rows on the lanes. So a row's maximum and total take one lane,
and no operation crosses lanes. A part is computed in two stages: its scores, then its weighted sum. While one part's
values are summed, the next one's scores are computed.

Scores are in units of log2, because the chip computes 2**x. A part that a row does not see changes nothing of that row.
So a part that all rows see needs no mask, and has the same bits as with one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from penstock.engine.attention.fused.layout import HeadLayout, tile_rows
from penstock.engine.attention.fused.pages import PageBuffers
from penstock.engine.attention.fused.softmax import (
    NEVER,
    HeadSinks,
    Int,
    ScoreFunction,
    as_column,
    each_head,
    heads_together,
    matmul,
)
from penstock.engine.kernels.pallas import Ref

_LOG2_E = math.log2(math.e)
_LOWEST = NEVER / 10
"""The first maximum: 2 ** (NEVER - _LOWEST) is 0, so masked keys weigh nothing, also before a row has seen any."""


@dataclass(frozen=True, slots=True)
class PartScores:
    """What the first stage leaves of a part, for the heads that are computed at once."""

    scores: Ref  # f32 [heads, keys, rows]
    top: Ref  # f32 [heads, 1, rows]: the maximum so far, this part included
    correction: Ref  # f32 [heads, 1, rows]: the factor of the sums before this part


@dataclass(frozen=True, slots=True)
class PrefillSoftmax:
    """The running state of all KV heads. A head's rows are its query heads times the block's tokens."""

    layout: HeadLayout
    function: ScoreFunction
    sinks: HeadSinks | None
    num_queries: int  # tokens in a block
    kv: PageBuffers
    q: Ref  # [num_kv_heads, rows, query width]
    parts: tuple[PartScores, PartScores]  # of parts with an even number, and with an odd one
    top: Ref  # f32 [num_kv_heads, 1, rows]
    total: Ref  # f32 [num_kv_heads, 1, rows]
    values: Ref  # f32 [num_kv_heads, query width, rows]

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return int(self.q.shape[0])

    @property
    def heads_at_once(self) -> int:
        return int(self.parts[0].top.shape[0])

    def start(self) -> None:
        self.total[...] = jnp.full_like(self.total, 0.0 if self.sinks is None else 1.0)
        self.values[...] = jnp.zeros_like(self.values)
        if self.sinks is None:
            self.top[...] = jnp.full_like(self.top, _LOWEST)
        else:
            self._start_at(self.sinks)

    def _start_at(self, sinks: HeadSinks) -> None:
        tiles = sinks.tiles
        shape = (tiles.rows, self.top.shape[2])
        row, query_head = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        query_head = query_head // self.num_queries

        def start(head: Int) -> None:
            is_meant = query_head == row - head % tiles.heads * tiles.group
            of_rows = jnp.where(is_meant, sinks.rows[head // tiles.heads][:, :1], 0.0)
            self.top[head] = jnp.sum(of_rows, axis=0, keepdims=True) * _LOG2_E

        each_head(self.num_heads, 1, start)

    def take(self, slot: Int, pieces: Any, visible: jax.Array) -> None:
        """Adds a part of the block in a buffer, of which rows see what is `visible` [keys, rows]."""

        def take(heads: list[Int]) -> None:
            for place, head in enumerate(heads):
                self._score(slot, pieces, head, place, self.parts[0], visible)
            for place, head in enumerate(heads):
                self._weigh(slot, pieces, head, place, self.parts[0])

        heads_together(self.num_heads, self.heads_at_once, take)

    def take_whole(self, slot: Int, parts: list[Any]) -> None:
        """Adds all parts of the block in a buffer, given by their pieces. All rows see all of it."""

        def take(heads: list[Int]) -> None:
            for number in range(len(parts) + 1):
                for place, head in enumerate(heads):
                    if number < len(parts):
                        self._score(slot, parts[number], head, place, self.parts[number % 2])
                    if number > 0:
                        self._weigh(slot, parts[number - 1], head, place, self.parts[(number - 1) % 2])

        heads_together(self.num_heads, self.heads_at_once, take)

    def result(self, head: Int) -> jax.Array:
        """Returns the head's result, f32 [rows, query width]."""
        return jnp.transpose(self.values[head] * (1.0 / jnp.maximum(self.total[head], 1e-30)))

    def _score(
        self, slot: Int, pieces: Any, head: Int, place: int, part: PartScores, visible: jax.Array | None = None
    ) -> None:
        keys = self.kv.keys_of(slot, head, pieces)
        score = self.function.transposed(self.q[head], keys.halves(self.layout, self.q.dtype)[0], keys, _LOG2_E)
        if visible is not None:
            score = jnp.where(visible, score, NEVER)
        before = self.top[head]
        top = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
        part.scores[place] = score
        self.top[head] = part.top[place] = top
        part.correction[place] = jnp.exp2(before - top)

    def _weigh(self, slot: Int, pieces: Any, head: Int, place: int, part: PartScores) -> None:
        keys, correction = self.kv.keys_of(slot, head, pieces), part.correction[place]
        weights = jnp.exp2(part.scores[place] - part.top[place])
        total, values = _sums(weights, keys.halves(self.layout, self.q.dtype)[1], keys.factors(1))
        self.total[head] = self.total[head] * correction + total
        self.values[head] = self.values[head] * correction + values


def _sums(weights: jax.Array, v: jax.Array, factors: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the total of `weights` [keys, rows], [1, rows], and the sum of `v` [keys, lanes] by them, [lanes, rows].

    Ones behind the transposed values sum the weights as they are multiplied. A sum of its own would keep them in
    registers for longer, which spills. Weights of codes with `factors` are not what is multiplied.
    """
    if factors is not None:
        total = jnp.sum(weights, axis=0, keepdims=True)
        return total, matmul(v, (weights * as_column(factors)).astype(v.dtype), contract_rows=True)
    lanes, ones = v.shape[1], jnp.ones((tile_rows(v.dtype.name), v.shape[0]), v.dtype)
    sums = matmul(jnp.concatenate([jnp.transpose(v), ones]), weights.astype(v.dtype))
    return sums[lanes : lanes + 1], sums[:lanes]
