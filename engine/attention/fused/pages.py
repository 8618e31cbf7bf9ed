"""The tables that the kernel reads, and its traffic of pages between HBM and VMEM."""

from __future__ import annotations

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
    """Scalars, in SMEM."""

    kv_lens: Ref  # [max_seqs]
    cu_q_lens: Ref  # [max_seqs + 1]
    pages: Ref  # [max_seqs * pages_per_seq]
    decoding: Ref  # [max_seqs]: first the sequences with one query
    prefilling: Ref  # [max_seqs]: first those with more
    info: Ref  # [4]: how many decode, how many prefill, the layer's first page, the sliding window


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

    def fetch(self, seq: Int, block: Int, slot: Int, end: Int) -> None:
        """Starts to bring in the pages of a block that hold keys before `end`."""
        lax.fori_loop(0, self._count(block, end), lambda i, _: self._arrival(seq, block, slot, i).start(), None)

    def wait(self, seq: Int, block: Int, slot: Int, end: Int) -> None:
        lax.fori_loop(0, self._count(block, end), lambda i, _: self._arrival(seq, block, slot, i).wait(), None)

    def tile_write(self, seq: Int, block: Int, slot: Int, row: Int) -> Any:
        """The transfer to HBM of the tile that begins at `row` of a buffer; the caller starts it and waits for it."""
        rows, page_size = self.blocks.tile_rows, self._page_size
        page = self._page(seq, block * self.blocks.pages + row // page_size)
        return pltpu.make_async_copy(
            self.buffer.at[slot, :, pl.ds(aligned(row, rows), rows), :],
            self.pages.at[page, :, pl.ds(aligned(row % page_size, rows), rows), :],
            self.written.at[slot],
        )

    def write_pages(self, seq: Int, block: Int, slot: Int, first_row: Int, end_row: Int) -> None:
        """Writes the pages that hold the rows `[first_row, end_row)` of a buffer, and waits for it."""
        first = jnp.maximum(first_row, 0) // self._page_size
        end = pl.cdiv(jnp.minimum(end_row, self.blocks.keys), self._page_size)

        def copy(i: Int) -> Any:
            page = self._page(seq, block * self.blocks.pages + i)
            return pltpu.make_async_copy(self._rows(slot, i), self.pages.at[page], self.written.at[slot])

        lax.fori_loop(first, end, lambda i, _: copy(i).start(), None)
        lax.fori_loop(first, end, lambda i, _: copy(i).wait(), None)

    @property
    def _page_size(self) -> int:
        return self.blocks.keys // self.blocks.pages

    def _count(self, block: Int, end: Int) -> jax.Array:
        return jnp.clip(pl.cdiv(end, self._page_size) - block * self.blocks.pages, 0, self.blocks.pages)

    def _arrival(self, seq: Int, block: Int, slot: Int, i: Int) -> Any:
        page = self._page(seq, block * self.blocks.pages + i)
        return pltpu.make_async_copy(self.pages.at[page], self._rows(slot, i), self.arrived.at[slot])

    def _rows(self, slot: Int, i: Int) -> Ref:
        start = aligned(i * self._page_size, self._page_size)
        return self.buffer.at[slot, :, pl.ds(start, self._page_size), :]

    def _page(self, seq: Int, place: Int) -> Int:
        page: Int = self.tables.pages[seq * self.pages_per_seq + place] + self.tables.info[2]
        return page
