"""The tokens of a block as decoding takes them: the query heads of a token on the sublanes of a tile, in f32.

A token's rows are loaded and stored whole. They are laid out for all tokens of a block at once, when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import LANES, HeadTiles
from penstock.engine.attention.fused.softmax import Int, aligned, each_head
from penstock.engine.attention.fused.tokens import TokenBlock
from penstock.engine.kernels.pallas import Ref


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of `num_tokens` tokens. After them there are some that belong to no token."""

    tokens: TokenBlock
    tiles: HeadTiles
    elements: PageElements
    q: Ref  # f32 [tiles, query width / LANES, rows of tokens, LANES]; strided rows are of LANES lanes
    out: Ref  # as q
    new: Ref  # i32 [num_kv_heads, rows of tokens, width]: the bits of new elements
    scales: Ref | None  # f32 [num_kv_heads, 2 * rows of tokens, LANES], the same in all lanes: of key and value in turn

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_queries

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return self.tokens.num_heads

    def clear(self) -> None:
        """Makes the rows finite that no token fills."""
        self.q[...] = jnp.zeros_like(self.q)
        self.out[...] = jnp.zeros_like(self.out)
        self.new[...] = jnp.zeros_like(self.new)
        if self.scales is not None:
            self.scales[...] = jnp.zeros_like(self.scales)

    def switch(self, j: Int, loaded: Int) -> None:
        """Loads block `j` unless it is `loaded`. First stores the results of the loaded block, if it is not -1."""

        @pl.when((j != loaded) & (loaded >= 0))
        def _() -> None:
            self.store(loaded)

        @pl.when(j != loaded)
        def _() -> None:
            self.tokens.load(j)
            self._each_query_head(self._spread)
            for head in range(self.num_heads):
                bits = self.elements.bits(self.tokens.new[head].astype(jnp.float32))
                self.new[head, pl.ds(0, self.num_tokens), :] = bits
            if self.scales is not None and self.tokens.scales is not None:
                self._spread_scales(self.scales, self.tokens.scales)

    def store(self, j: Int) -> None:
        """Writes the results of a block."""
        self._each_query_head(self._gather)
        self.tokens.store(j)

    def query(self, tile: Int, token: Int) -> jax.Array:
        """Returns a token's queries, f32 [rows, query width]."""
        return jnp.concatenate([self.q[tile, part, self._rows(token), :] for part in range(self.q.shape[1])], axis=1)

    def put_result(self, tile: Int, token: Int, result: jax.Array) -> None:
        for part in range(self.out.shape[1]):
            self.out[tile, part, self._rows(token), :] = result[:, part * LANES : (part + 1) * LANES]

    def new_row(self, head: Int, token: Int) -> jax.Array:
        """Returns the bits of a token's new row of a page, i32 [1, width]."""
        row: jax.Array = self.new[head, pl.ds(token, 1), :]
        return row

    def _spread_scales(self, ours: Ref, theirs: Ref) -> None:
        for i in range(2 * self.num_heads):  # unrolled: lanes can only be taken at fixed places
            column = jnp.broadcast_to(theirs[:, i : i + 1], (self.num_tokens, LANES))
            ours[i // 2, pl.ds(i % 2, self.num_tokens, stride=2), :] = column

    def _rows(self, token: Int) -> Any:
        return pl.ds(aligned(token * self.tiles.rows, self.tiles.rows), self.tiles.rows)

    def _each_query_head(self, move: Any) -> None:
        def each(tile: Int) -> None:
            for row in range(self.tiles.heads * self.tiles.group):
                head, place = tile * self.tiles.heads + row // self.tiles.group, row % self.tiles.group
                strided = pl.ds(row, self.num_tokens, stride=self.tiles.rows)
                for part in range(self.q.shape[1]):
                    move(
                        (tile, part, strided, slice(None)),
                        (head, pl.ds(place * self.num_tokens, self.num_tokens), pl.ds(part * LANES, LANES)),
                    )

        each_head(self.tiles.num, 1, each)

    def _spread(self, ours: Any, theirs: Any) -> None:
        self.q[ours] = self.tokens.q[theirs].astype(jnp.float32)

    def _gather(self, ours: Any, theirs: Any) -> None:
        self.tokens.out[theirs] = self.out[ours].astype(self.tokens.out.dtype)
