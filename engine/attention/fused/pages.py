"""The tables that the kernel reads, and its transfers of pages between HBM and VMEM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.layout import LANES, BlockSizes
from penstock.engine.attention.fused.softmax import Int, KeyBlock, aligned
from penstock.engine.kernels.pallas import Ref


@dataclass(frozen=True, slots=True)
class Tables:
    """Scalars in SMEM: the step's (`prepared.py`), then the layer's."""

    kv_lens: Ref  # [max_seqs]
    cu_q_lens: Ref  # [max_seqs + 1]
    pages: Ref  # [max_seqs * pages_per_seq]
    decoding: Ref  # [max_seqs]: the sequences with one query come first
    prefilling: Ref  # [max_seqs]: those with more come first
    counts: Ref  # [2]: numbers of decoding and of prefilling sequences
    first_page: Ref  # [1]: index of the first page of the layer's array


class ScaleBlocks(NamedTuple):
    """The tokens' scales for 8-bit codes: those of keys, then those of values."""

    pages: Ref  # in HBM, f32 [pages, num_kv_heads, 2, page_size]
    buffer: Ref  # [2, num_kv_heads, 2, keys]


@dataclass(frozen=True, slots=True)
class PageBuffers:
    """Two buffers of keys and values, each for a block of pages."""

    blocks: BlockSizes
    tables: Tables
    pages: Ref  # in HBM, [pages, num_kv_heads, page_size, width]
    buffer: Ref  # [2, num_kv_heads, keys, width]
    arrived: Ref  # semaphores, one per buffer
    written: Ref
    pages_per_seq: int
    scales: ScaleBlocks | None  # only for 8-bit codes

    def keys_of(self, slot: Int, head: Int, first: Int, num: int) -> KeyBlock:
        """Returns `num` keys of a buffer from `first` on; both are multiples of a page."""
        rows = pl.ds(first, num)
        scales = None if self.scales is None else self.scales.buffer.at[slot, head, :, rows]
        return KeyBlock(self.buffer.at[slot, head, rows, :], scales)

    def fetch(self, seq: Int, block: Int, slot: Int, first: Int, end: Int) -> None:
        """Starts to fetch a block's keys at positions from `first` to before `end`, in whole tiles."""
        self._each_arrival(seq, block, slot, first, end, _start)

    def wait(self, seq: Int, block: Int, slot: Int, first: Int, end: Int) -> None:
        self._each_arrival(seq, block, slot, first, end, _wait)

    def write_tile(self, seq: Int, block: Int, slot: Int, row: Int) -> None:
        """Starts to write back the tile that begins at `row` of a buffer, with its scales; one at a time for each
        buffer.
        """
        for copy in self._tile(seq, block, slot, row):
            copy.start()

    def await_tile(self, slot: Int) -> None:
        for copy in self._tile(0, 0, slot, 0):  # a wait only needs the size
            copy.wait()

    def write_rows(self, seq: Int, block: Int, slot: Int, first_row: Int, end_row: Int) -> None:
        """Writes the tiles that hold the rows `[first_row, end_row)` of a buffer, and waits until they are written."""
        for act in (_start, _wait):
            self._each_copy(seq, block, slot, first_row, end_row, act, out=True)

    def _each_arrival(self, seq: Int, block: Int, slot: Int, first: Int, end: Int, act: Callable[[Any], None]) -> None:
        start = block * self.blocks.keys
        self._each_copy(seq, block, slot, first - start, end - start, act)

    def _each_copy(
        self,
        seq: Int,
        block: Int,
        slot: Int,
        first_row: Int,
        end_row: Int,
        act: Callable[[Any], None],
        *,
        out: bool = False,
    ) -> None:
        """Calls `act` with each copy of the tiles that hold the rows `[first_row, end_row)` of a buffer, and of their
        scales.
        """
        first, end = self._tile_rows(first_row, end_row, self.blocks.tile_rows)
        self._each_piece(first, end, lambda row, size: act(self._copy(seq, block, slot, row, size, out=out)))
        scales = self.scales
        if scales is not None:
            first, end = self._tile_rows(first_row, end_row, LANES)

            def move(i: Int, _: None) -> None:
                act(self._scale_copy(scales, seq, block, slot, i * LANES, out=out))

            lax.fori_loop(first // LANES, end // LANES, move, None)

    def _tile(self, seq: Int, block: Int, slot: Int, row: Int) -> list[Any]:
        codes = self._copy(seq, block, slot, row, self.blocks.tile_rows, out=True)
        if self.scales is None:
            return [codes]
        return [codes, self._scale_copy(self.scales, seq, block, slot, row // LANES * LANES, out=True)]

    def _copy(self, seq: Int, block: Int, slot: Int, row: Int, size: int, *, out: bool) -> Any:
        """Returns the copy of some rows of one page into a buffer, or with `out` the other way."""
        tile = self.blocks.tile_rows
        near = self.buffer.at[slot, :, pl.ds(aligned(row, tile), size), :]
        place = aligned(row % self._page_size, tile)
        return self._copy_between(near, self.pages.at[self._page(seq, block, row), :, pl.ds(place, size), :], slot, out)

    def _scale_copy(self, scales: ScaleBlocks, seq: Int, block: Int, slot: Int, row: Int, *, out: bool) -> Any:
        """Returns the copy of the scales of LANES tokens from `row` on, in the same direction."""
        near = scales.buffer.at[slot, :, :, pl.ds(aligned(row, LANES), LANES)]
        place = aligned(row % self._page_size, LANES)
        return self._copy_between(
            near, scales.pages.at[self._page(seq, block, row), :, :, pl.ds(place, LANES)], slot, out
        )

    def _copy_between(self, near: Ref, far: Ref, slot: Int, out: bool) -> Any:
        if out:
            return pltpu.make_async_copy(near, far, self.written.at[slot])
        return pltpu.make_async_copy(far, near, self.arrived.at[slot])

    def _page(self, seq: Int, block: Int, row: Int) -> Int:
        place = block * self.blocks.pages + row // self._page_size
        page: Int = self.tables.pages[seq * self.pages_per_seq + place] + self.tables.first_page[0]
        return page

    def _tile_rows(self, first_row: Int, end_row: Int, tile: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first and end row of a buffer's tiles that hold the rows `[first_row, end_row)`."""
        end = jnp.clip(pl.cdiv(end_row, tile) * tile, 0, self.blocks.keys)
        return jnp.clip(first_row // tile * tile, 0, end), end

    def _each_piece(self, first: Int, end: Int, work: Callable[[Int, int], None]) -> None:
        """Calls `work` with the first row and the size of each piece of a buffer's rows from `first` to `end`.

        Pieces are whole pages; of a partial page, powers of two of tiles within it.
        """
        page_size = self._page_size
        first_page, end_page = pl.cdiv(first, page_size), end // page_size
        head_end = jnp.minimum(first_page * page_size, end)
        self._each_part(first, head_end, work)
        lax.fori_loop(first_page, end_page, lambda i, _: work(i * page_size, page_size), None)
        self._each_part(jnp.maximum(end_page * page_size, head_end), end, work)

    def _each_part(self, first: Int, end: Int, work: Callable[[Int, int], None]) -> None:
        """Calls `work` with the pieces of a partial page."""
        tile = self.blocks.tile_rows
        count = (end - first) // tile
        for bit in reversed(range((self._page_size // tile - 1).bit_length())):

            @pl.when((count >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:
                work(first + (count >> (bit + 1) << (bit + 1)) * tile, tile << bit)

    @property
    def _page_size(self) -> int:
        return self.blocks.keys // self.blocks.pages


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()
