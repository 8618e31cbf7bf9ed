"""Online softmax of prefill (Milakov and Gimelshein, arXiv 1805.02867), over parts of a block of keys.

Scores are transposed: keys lie on the sublanes and query rows on the lanes. So a row's maximum and total take one lane,
and no operation crosses lanes. A part is computed in two stages: its scores, then its weighted sum. While one part's
values are summed, the next one's scores are computed, even if that one lies in the next block: until then, the part
is held.

Scores are in units of log2, because the chip computes 2**x. A part that a row does not see leaves that row as it is. A
part that all rows see needs no mask, and gives the same bits without one.
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
class Part:
    """A part of a block of keys whose scores are computed, but not yet its weighted sum."""

    scores: Ref  # f32 [num_kv_heads, keys, rows]
    top: Ref  # f32 [num_kv_heads, 1, rows]: the maximum so far, this part included
    correction: Ref  # f32 [num_kv_heads, 1, rows]: the factor of the sums before this part
    values: Ref  # [num_kv_heads, query width, keys]
    factors: Ref | None  # f32 [num_kv_heads, 1, keys]: those of the values, only for 8-bit codes


@dataclass(frozen=True, slots=True)
class PrefillSoftmax:
    """The running state of all KV heads. A head's rows are its query heads times the block's tokens."""

    layout: HeadLayout
    function: ScoreFunction
    sinks: HeadSinks | None
    num_queries: int  # tokens in a block
    heads_at_once: int
    kv: PageBuffers
    q: Ref  # [num_kv_heads, rows, query width]
    parts: tuple[Part, Part]  # used in turn; a part that is held is in the second
    top: Ref  # f32 [num_kv_heads, 1, rows]
    total: Ref  # f32 [num_kv_heads, 1, rows]
    values: Ref  # f32 [num_kv_heads, query width, rows]

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return int(self.q.shape[0])

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

    def take(self, slot: Int, pieces: Any, visible: jax.Array, *, with_held: bool) -> None:
        """Adds a part of the block in a buffer; `visible` [keys, rows] says what each row sees of it. With `with_held`,
        the part that is held is added before it.
        """

        def take(heads: list[Int]) -> None:
            for head in heads:
                self._score(slot, pieces, head, self.parts[0], visible)
                if with_held:
                    self._weigh(head, self.parts[1])
            for head in heads:
                self._weigh(head, self.parts[0])

        heads_together(self.num_heads, self.heads_at_once, take)

    def take_whole(self, slot: Int, parts: list[Any], *, with_held: bool) -> None:
        """Adds the parts of the block in a buffer, given by their pieces. All rows see all of them. With
        `with_held`, the part that is held is added first. The last part is then held: its scores are computed, and its
        sum is not.
        """

        def take(heads: list[Int]) -> None:
            before = self.parts[1] if with_held else None
            for number, pieces in enumerate(parts):
                part = self.parts[(number + len(parts)) % 2]  # the last one is in parts[1]
                for head in heads:
                    if part is before:  # the first of an odd number of parts, which takes its place
                        self._weigh(head, part)
                    self._score(slot, pieces, head, part)
                    if before is not None and before is not part:
                        self._weigh(head, before)
                before = part

        heads_together(self.num_heads, self.heads_at_once, take)

    def result(self, head: Int) -> jax.Array:
        """Returns the head's result, f32 [rows, query width]."""
        return jnp.transpose(self.values[head] * (1.0 / jnp.maximum(self.total[head], 1e-30)))

    def _score(self, slot: Int, pieces: Any, head: Int, part: Part, visible: jax.Array | None = None) -> None:
        keys = self.kv.keys_of(slot, head, pieces)
        k, v = keys.halves(self.layout, self.q.dtype)
        score = self.function.transposed(self.q[head], k, keys, _LOG2_E)
        if visible is not None:
            score = jnp.where(visible, score, NEVER)
        before = self.top[head]
        top = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
        part.scores[head] = score
        self.top[head] = part.top[head] = top
        part.correction[head] = jnp.exp2(before - top)
        part.values[head] = jnp.transpose(v)
        if part.factors is not None:
            part.factors[head] = keys.factors(1)

    def _weigh(self, head: Int, part: Part) -> None:
        weights, correction = jnp.exp2(part.scores[head] - part.top[head]), part.correction[head]
        total, values = _sums(weights, part.values[head], None if part.factors is None else part.factors[head])
        self.total[head] = self.total[head] * correction + total
        self.values[head] = self.values[head] * correction + values


def _sums(weights: jax.Array, v: jax.Array, factors: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the total of `weights` [keys, rows], [1, rows], and the sum of `v` [lanes, keys] by them, [lanes, rows].

    Ones that are appended to the values make the matmul sum the weights as well. A sum apart from it would keep the
    weights in registers for longer, and they would spill. With `factors` there is such a sum all the same, because the
    matmul then gets weights times factors.
    """
    if factors is not None:
        total = jnp.sum(weights, axis=0, keepdims=True)
        return total, matmul(v, (weights * as_column(factors)).astype(v.dtype))
    lanes, ones = v.shape[0], jnp.ones((tile_rows(v.dtype.name), v.shape[1]), v.dtype)
    sums = matmul(jnp.concatenate([v, ones]), weights.astype(v.dtype))
    return sums[lanes : lanes + 1], sums[:lanes]
