"""The tables that the kernel reads, and its traffic of pages between HBM and VMEM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.layout import Blocks
from penstock.engine.attention.fused.softmax import Int, Ref, aligned


@dataclass(frozen=True, slots=True)
class Tables:
    """Scalars, in SMEM: a step's (`prepared.py`), and behind them the layer's."""

    kv_lens: Ref  # [max_seqs]
    cu_q_lens: Ref  # [max_seqs + 1]
    pages: Ref  # [max_seqs * pages_per_seq]
    decoding: Ref  # [max_seqs]: first the sequences with one query
    prefilling: Ref  # [max_seqs]: first those with more
    counts: Ref  # [2]: how many decode, how many prefill
    first_page: Ref  # [1]: where the pages of the layer's array begin


@dataclass(frozen=True, slots=True)
class PageBlocks:
    """Two buffers of keys and values, each a block of pages."""

    blocks: Blocks
    tables: Tables
    pages: Ref  # in HBM, [pages, num_kv_heads, page_size, width]
    buffer: Ref  # [2, num_kv_heads, keys, width]
    arrived: Ref  # semaphores, one per buffer
    written: Ref
    pages_per_seq: int

    def fetch(self, seq: Int, block: Int, slot: Int, first: Int, end: Int) -> None:
        """Starts to bring in those of a block's keys that are at positions from `first` and before `end`, in whole
        tiles.
        """
        self._each_arrival(seq, block, slot, first, end, lambda copy: copy.start())

    def wait(self, seq: Int, block: Int, slot: Int, first: Int, end: Int) -> None:
        self._each_arrival(seq, block, slot, first, end, lambda copy: copy.wait())

    def tile_write(self, seq: Int, block: Int, slot: Int, row: Int) -> Any:
        """The transfer to HBM of the tile that begins at `row` of a buffer; the caller starts it and waits for it."""
        return self._write(seq, block, slot, row, self.blocks.tile_rows)

    def write_rows(self, seq: Int, block: Int, slot: Int, first_row: Int, end_row: Int) -> None:
        """Writes the tiles that hold the rows `[first_row, end_row)` of a buffer, and waits for it."""
        first, end = self._in_tiles(first_row, end_row)
        self._each_piece(first, end, lambda row, size: self._write(seq, block, slot, row, size).start())
        self._each_piece(first, end, lambda row, size: self._write(seq, block, slot, row, size).wait())

    def _each_arrival(self, seq: Int, block: Int, slot: Int, first: Int, end: Int, act: Callable[[Any], None]) -> None:
        start = block * self.blocks.keys

        def arrive(row: Int, size: int) -> None:
            rows, held = self._places(seq, block, slot, row, size)
            act(pltpu.make_async_copy(held, rows, self.arrived.at[slot]))

        self._each_piece(*self._in_tiles(first - start, end - start), arrive)

    def _write(self, seq: Int, block: Int, slot: Int, row: Int, size: int) -> Any:
        rows, held = self._places(seq, block, slot, row, size)
        return pltpu.make_async_copy(rows, held, self.written.at[slot])

    def _places(self, seq: Int, block: Int, slot: Int, row: Int, size: int) -> tuple[Ref, Ref]:
        """Some rows of one page, in the buffer and in HBM."""
        tile, page_size = self.blocks.tile_rows, self._page_size
        place = block * self.blocks.pages + row // page_size
        page = self.tables.pages[seq * self.pages_per_seq + place] + self.tables.first_page[0]
        return (
            self.buffer.at[slot, :, pl.ds(aligned(row, tile), size), :],
            self.pages.at[page, :, pl.ds(aligned(row % page_size, tile), size), :],
        )

    def _in_tiles(self, first_row: Int, end_row: Int) -> tuple[jax.Array, jax.Array]:
        """Where the tiles that hold the rows `[first_row, end_row)` begin and end, of those in a buffer."""
        tile = self.blocks.tile_rows
        end = jnp.clip(pl.cdiv(end_row, tile) * tile, 0, self.blocks.keys)
        return jnp.clip(first_row // tile * tile, 0, end), end

    def _each_piece(self, first: Int, end: Int, work: Callable[[Int, int], None]) -> None:
        """Runs `work` with the first row and the size of each piece of a buffer's rows from `first` to `end`: whole
        pages, and of others powers of two of tiles, within the page.
        """
        page_size = self._page_size
        first_page, end_page = pl.cdiv(first, page_size), end // page_size
        head_end = jnp.minimum(first_page * page_size, end)
        self._each_part(first, head_end, work)
        lax.fori_loop(first_page, end_page, lambda i, _: work(i * page_size, page_size), None)
        self._each_part(jnp.maximum(end_page * page_size, head_end), end, work)

    def _each_part(self, first: Int, end: Int, work: Callable[[Int, int], None]) -> None:
        """Of a page of which not all rows are meant."""
        tile = self.blocks.tile_rows
        count = (end - first) // tile
        for bit in reversed(range((self._page_size // tile - 1).bit_length())):

            @pl.when((count >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:
                work(first + (count >> (bit + 1) << (bit + 1)) * tile, tile << bit)

    @property
    def _page_size(self) -> int:
        return self.blocks.keys // self.blocks.pages
