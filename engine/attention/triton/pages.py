"""The pages as the kernels see them: [num_pages, num_kv_heads, page_size, head_dim], keys and values apart."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from penstock.engine.attention.triton.tiles import Heads, power_of_two
from penstock.engine.kernels.pallas import Ref

_Int = jax.Array | int


@dataclass(frozen=True, slots=True)
class PageBlocks:
    """Blocks of keys and values of one sequence and KV head."""

    keys: Ref
    values: Ref
    table: Ref  # i32 [max_seqs, pages_per_seq]
    heads: Heads
    size: int  # tokens in a block
    seq: _Int
    head: _Int  # KV head

    def pages(self, block: _Int, end: _Int) -> jax.Array:
        """Returns a block's location: the one page that holds all of it, or the page of each of its tokens [size, 1].

        For positions from `end` on it is some valid page. Loops carry the location to the next iteration. If the
        iteration that loads the keys also loaded their address, Triton would load them one block later and wait for
        each.
        """
        page_size = self.keys.shape[2]
        if page_size % self.size == 0:
            page: jax.Array = self.table[self.seq, lax.div(jnp.minimum(block * self.size, end - 1), page_size)]
            return page
        key = self._positions(block)
        numbers = self.table.at[self.seq, lax.div(key, page_size)]
        return plgpu.load(numbers, mask=key < end, other=0)[:, None]

    def load(self, block: _Int, pages: jax.Array, end: _Int | None) -> tuple[jax.Array, jax.Array]:
        """Loads keys and values [size, width] of a block, with zeros from the position `end` on; None: the block is
        full.

        What lies after a sequence's end is never read: it may be from an earlier sequence, and NaN.
        """
        page_size = self.keys.shape[2]
        if page_size % self.size == 0:
            place = lax.rem(block * self.size, page_size) + jnp.arange(self.size, dtype=jnp.int32)
        else:
            place = lax.rem(self._positions(block), page_size)
        lane = jnp.arange(self.heads.width, dtype=jnp.int32)[None, :]
        at = (pages, self.head, place[:, None], lane)
        held = None if end is None else (self._positions(block) < end)[:, None]
        mask = lanes_mask(self.heads, (self.size, self.heads.width), held)
        return masked_load(self.keys.at[at], mask), masked_load(self.values.at[at], mask)

    def _positions(self, block: _Int) -> jax.Array:
        return block * self.size + jnp.arange(self.size, dtype=jnp.int32)


def lanes_mask(heads: Heads, shape: tuple[int, int], rows: jax.Array | None) -> jax.Array | None:
    """Returns which of a tile's elements exist: those in `rows` [rows, 1] and in the first head_dim lanes.
    None: all.
    """
    mask = None if rows is None else jnp.broadcast_to(rows, shape)
    if heads.width != heads.head_dim:
        lanes = jnp.broadcast_to(jnp.arange(heads.width, dtype=jnp.int32)[None, :] < heads.head_dim, shape)
        mask = lanes if mask is None else mask & lanes
    return mask


def masked_load(ref: Ref, mask: jax.Array | None) -> jax.Array:
    """Loads what the mask lets through, and zeros in the place of everything else."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def write_kernel(
    k: Ref,  # [num_tokens, num_kv_heads, head_dim]
    v: Ref,
    slots: Ref,  # i32 [num_tokens]
    _keys: Ref,
    _values: Ref,
    keys: Ref,  # the pages, in place
    values: Ref,
    *,
    heads: Heads,
) -> None:
    """Writes one token's keys and values into its slot, for all heads. Padding tokens overwrite one another
    in page 0.
    """
    token = pl.program_id(0)
    slot, page_size = slots[token], keys.shape[2]
    rows = power_of_two(heads.num_kv_heads)
    head = jnp.arange(rows, dtype=jnp.int32)[:, None]
    lane = jnp.arange(heads.width, dtype=jnp.int32)[None, :]
    mask = lanes_mask(heads, (rows, heads.width), None if rows == heads.num_kv_heads else head < heads.num_kv_heads)
    source, target = (token, head, lane), (lax.div(slot, page_size), head, lax.rem(slot, page_size), lane)
    plgpu.store(keys.at[target], masked_load(k.at[source], mask).astype(keys.dtype), mask=mask)
    plgpu.store(values.at[target], finite(masked_load(v.at[source], mask), values.dtype), mask=mask)


def finite(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts to `dtype`, with NaN as 0 and infinities as the largest number: as values they would survive a weight of
    0.
    """
    top = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(wide), 0.0, jnp.clip(wide, -top, top)).astype(dtype)
