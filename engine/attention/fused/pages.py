"""The tables that the kernel reads, and its transfers of pages between HBM and VMEM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import LANES, KeyBlockSizes
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


class HeldPages(NamedTuple):
    """The pages in HBM."""

    codes: Ref  # [pages, num_kv_heads, page_size, width]
    scales: Ref | None  # f32 [pages, num_kv_heads, 2 (of keys, of values), page_size], only for 8-bit codes
    pages_per_seq: int


class Buffers(NamedTuple):
    """Buffers of keys and values in VMEM, each for a block of keys."""

    codes: Ref  # [buffers, pieces, num_kv_heads, rows, width]
    scales: Ref | None  # [buffers, pieces, num_kv_heads, 2, rows]
    arrived: Ref  # semaphores, one per buffer
    written: Ref


@dataclass(frozen=True, slots=True)
class PageBuffers:
    """Transfers between pages and buffers.

    A piece is laid out in a buffer as in its page, one KV head after the other. So a piece that is a whole page is one
    contiguous transfer.
    """

    sizes: KeyBlockSizes
    tile_rows: int
    tables: Tables
    pages: HeldPages
    buffers: Buffers
    elements: PageElements
    is_windowed: bool  # False: `first` is always 0

    def clear(self, first_lane: int) -> None:
        """Makes all values, which are on the lanes from `first_lane` on, finite: those that no page fills are
        multiplied by a weight of 0.
        """
        *shape, width = self.buffers.codes.shape
        self.buffers.codes[..., first_lane:] = jnp.zeros((*shape, width - first_lane), self.buffers.codes.dtype)
        if self.buffers.scales is not None:
            self.buffers.scales[...] = jnp.zeros_like(self.buffers.scales)

    def keys_of(self, slot: Int, head: Int, pieces: Any = slice(None)) -> KeyBlock:
        """Returns the keys of a buffer, or of some pieces of it."""
        scales = self.buffers.scales
        return KeyBlock(
            self.buffers.codes.at[slot, pieces, head],
            None if scales is None else scales.at[slot, pieces, head],
            self.elements,
        )

    def fetch(self, seq: Int, block: Int, slot: Int, first: Int, end: Int) -> None:
        """Starts to fetch a block's keys at positions from `first` to before `end`, in whole tiles."""
        start = block * self.sizes.keys
        self._each_copy(seq, block, slot, first - start, end - start, _start)

    def wait(self, block: Int, slot: Int, first: Int, end: Int) -> None:
        start = block * self.sizes.keys
        self._each_copy(0, 0, slot, first - start, end - start, _wait)  # a wait only needs the sizes

    def write_tile(self, seq: Int, block: Int, slot: Int, row: Int) -> None:
        """Starts to write back the tile that begins at `row` of a buffer, with its scales; one at a time for each
        buffer.
        """
        for copy in self._tile(seq, block, slot, row):
            copy.start()

    def await_tile(self, slot: Int) -> None:
        for copy in self._tile(0, 0, slot, 0):
            copy.wait()

    def write_rows(self, seq: Int, block: Int, slot: Int, first_row: Int, end_row: Int) -> None:
        """Writes the tiles that hold the rows `[first_row, end_row)` of a buffer, and waits until they are written."""
        for act in (_start, _wait):
            self._each_copy(seq, block, slot, first_row, end_row, act, out=True)

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
        is_partial = out or self.is_windowed
        first_row = first_row if is_partial else 0
        first, end = self._tile_rows(first_row, end_row, self.tile_rows)
        is_whole = end - first == self.sizes.keys

        @pl.when(is_whole)
        def _() -> None:
            for copy in self._whole(seq, block, slot, out=out, is_wait=act is _wait):
                act(copy)

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            def copy(piece: Int, row: Int, size: int) -> None:
                act(self._copy(seq, block, slot, piece, row, size, out=out))

            self._each_part(first, end, copy, is_partial=is_partial)
            scales = self._scales
            if scales is not None:
                first_lane, end_lane = self._tile_rows(first_row, end_row, LANES)
                per_piece = self.sizes.rows // LANES

                def move(i: Int, _: None) -> None:
                    piece, row = quotient(i, per_piece), remainder(i, per_piece) * LANES
                    act(self._scale_copy(scales, seq, block, slot, piece, row, LANES, out=out))

                lax.fori_loop(quotient(first_lane, LANES), quotient(end_lane, LANES), move, None)

    def _whole(self, seq: Int, block: Int, slot: Int, *, out: bool, is_wait: bool) -> list[Any]:
        """Returns the copies of a whole block. Unrolled, they start soonest, and one wait is enough for all pieces."""
        scales = self._scales
        if is_wait:
            near = [self.buffers.codes] if scales is None else [self.buffers.codes, scales[0]]
            return [self._copy_between(array.at[slot], array.at[slot], slot, out) for array in near]
        rows, pieces = self.sizes.rows, range(self.sizes.pieces)
        copies = [self._copy(seq, block, slot, piece, 0, rows, out=out) for piece in pieces]
        if scales is not None:
            copies += [self._scale_copy(scales, seq, block, slot, piece, 0, rows, out=out) for piece in pieces]
        return copies

    def _tile(self, seq: Int, block: Int, slot: Int, row: Int) -> list[Any]:
        piece, row = quotient(row, self.sizes.rows), remainder(row, self.sizes.rows)
        codes = self._copy(seq, block, slot, piece, row, self.tile_rows, out=True)
        scales = self._scales
        if scales is None:
            return [codes]
        return [codes, self._scale_copy(scales, seq, block, slot, piece, quotient(row, LANES) * LANES, LANES, out=True)]

    def _copy(self, seq: Int, block: Int, slot: Int, piece: Int, row: Int, size: int, *, out: bool) -> Any:
        """Returns the copy of some rows of a piece into a buffer, or with `out` the other way."""
        page, first = self._page(seq, block, piece)
        near = self.buffers.codes.at[slot, piece]
        far = self.pages.codes.at[page]
        if size != self.sizes.rows:
            near = near.at[:, pl.ds(aligned(row, self.tile_rows), size), :]
            far = far.at[:, pl.ds(aligned(first + row, self.tile_rows), size), :]
        elif self.sizes.pieces_per_page > 1:
            far = far.at[:, pl.ds(aligned(first, self.sizes.rows), size), :]
        return self._copy_between(near, far, slot, out)

    @property
    def _scales(self) -> tuple[Ref, Ref] | None:
        """Returns the scales in VMEM and in HBM, if there are any."""
        near, far = self.buffers.scales, self.pages.scales
        return None if near is None or far is None else (near, far)

    def _scale_copy(
        self, scales: tuple[Ref, Ref], seq: Int, block: Int, slot: Int, piece: Int, row: Int, size: int, *, out: bool
    ) -> Any:
        """Returns the copy of the scales of `size` tokens from `row` of a piece on, in the same direction."""
        page, first = self._page(seq, block, piece)
        near = scales[0].at[slot, piece, :, :, pl.ds(aligned(row, LANES), size)]
        far = scales[1].at[page, :, :, pl.ds(aligned(first + row, LANES), size)]
        return self._copy_between(near, far, slot, out)

    def _copy_between(self, near: Ref, far: Ref, slot: Int, out: bool) -> Any:
        if out:
            return pltpu.make_async_copy(near, far, self.buffers.written.at[slot])
        return pltpu.make_async_copy(far, near, self.buffers.arrived.at[slot])

    def _page(self, seq: Int, block: Int, piece: Int) -> tuple[Int, Int]:
        """Returns the page of a piece, and its first row there."""
        place, parts = block * self.sizes.pieces + piece, self.sizes.pieces_per_page
        first = remainder(place, parts) * self.sizes.rows
        entry = seq * self.pages.pages_per_seq + quotient(place, parts)
        return self.tables.pages[entry] + self.tables.first_page[0], first

    def _tile_rows(self, first_row: Int, end_row: Int, tile: int) -> tuple[Int, Int]:
        """Returns the first and end row of a buffer's tiles that hold the rows `[first_row, end_row)`."""
        end = quotient(jnp.clip(end_row, 0, self.sizes.keys) + tile - 1, tile) * tile
        if isinstance(first_row, int):
            return first_row, end
        return jnp.minimum(quotient(jnp.clip(first_row, 0, self.sizes.keys), tile) * tile, end), end

    def _each_part(self, first: Int, end: Int, work: Callable[[Int, Int, int], None], *, is_partial: bool) -> None:
        """Calls `work` with the piece, the first row in it and the size of each part of a buffer's rows from `first` to
        `end`; with `is_partial`, `first` may lie inside a piece.

        A whole piece is one part. A partial piece is divided into parts of a power of two of tiles each.
        """
        rows = self.sizes.rows
        first_piece: Int = 0
        end_piece, start = quotient(end, rows), end
        if is_partial:
            first_piece = quotient(first + rows - 1, rows)
            start = jnp.minimum(first_piece * rows, end)
            self._each_power(first, start, quotient(first, rows), work)
            end_piece, start = jnp.maximum(end_piece, first_piece), jnp.maximum(end, start)
        lax.fori_loop(first_piece, end_piece, lambda piece, _: work(piece, 0, rows), None)
        self._each_power(jnp.minimum(end_piece * rows, start), start, end_piece, work)

    def _each_power(self, first: Int, end: Int, piece: Int, work: Callable[[Int, Int, int], None]) -> None:
        """Calls `work` with the parts of a partial piece."""
        tile = self.tile_rows
        count, row = quotient(end - first, tile), first - piece * self.sizes.rows
        for bit in reversed(range((self.sizes.rows // tile - 1).bit_length())):

            @pl.when((count >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:
                work(piece, row + (count >> (bit + 1) << (bit + 1)) * tile, tile << bit)


def quotient(value: Int, divisor: int) -> Int:
    """Divides a value that is not negative. In scalar code that is cheaper than `//`, which has to handle the sign."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1)
    return lax.div(jnp.asarray(value, jnp.int32), jnp.int32(divisor))


def remainder(value: Int, divisor: int) -> Int:
    """Returns what `quotient` leaves."""
    if divisor & (divisor - 1) == 0:
        return value & (divisor - 1)
    return lax.rem(jnp.asarray(value, jnp.int32), jnp.int32(divisor))


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()
