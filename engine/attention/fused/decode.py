"""Decoding: the sequences with one query.

Their blocks of keys form one list, sequence after sequence. An iteration takes the next few blocks of the list, of
whichever sequences, while those of later iterations are being fetched. So short sequences share the cost of an
iteration, and a long one waits for no other. All blocks of an iteration belong to tokens of one block of tokens; if
there are too few of them, the last buffers stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.decode_softmax import Attended, DecodeSoftmax
from penstock.engine.attention.fused.pages import PageBuffers, Tables, quotient, remainder
from penstock.engine.attention.fused.scales import with_scales
from penstock.engine.attention.fused.softmax import Int, aligned, heads_together
from penstock.engine.attention.fused.token_rows import TokenRows
from penstock.engine.kernels.pallas import Ref

NUM_SETS = 3
"""Sets of buffers: blocks of one are computed while those of the other two are on their way."""

_Carry = tuple[Int, Int, Int, Int]  # the next block to fetch (sequence in the list, block), set, block of tokens


class Items(NamedTuple):
    """What the buffers hold, in SMEM; each array has an entry per buffer."""

    seqs: Ref  # -1: nothing
    blocks: Ref  # blocks of keys
    kv_lens: Ref
    token_blocks: Ref
    rows: Ref  # rows in the block of tokens
    pending: Ref  # 1 while a write from the buffer is in flight


class Place(NamedTuple):
    """Where the new token of a buffer's sequence goes, if its key is in the buffer."""

    slot: Int
    piece: Int
    start: Int  # of its tile, in the piece
    row: Int  # in the piece; -1: it is not in the buffer


@dataclass(frozen=True, slots=True)
class Decode:
    tables: Tables
    kv: PageBuffers
    softmax: DecodeSoftmax
    rows: TokenRows
    items: Items
    at_once: int  # blocks of keys in an iteration
    window: int
    reads_only: bool  # the pages already hold the step's keys and values

    def run(self) -> None:
        @pl.when(self._num_seqs > 0)
        def _() -> None:
            self.kv.clear(self.softmax.layout.value_start)
            self.rows.clear()
            for slot in range(NUM_SETS * self.at_once):
                self.items.pending[slot] = 0
            place = (jnp.int32(0), jnp.asarray(self._first_block(self._kv_len(0)), jnp.int32))
            place = lax.fori_loop(0, NUM_SETS - 1, lambda number, place: self._fetch(place, number), place)
            first: _Carry = (*place, jnp.int32(0), jnp.int32(-1))
            last = lax.while_loop(lambda carry: self.items.seqs[carry[2] * self.at_once] >= 0, self._step, first)
            self.rows.store(last[3])
            for slot in range(NUM_SETS * self.at_once):
                self._settle(slot)

    @property
    def _num_seqs(self) -> Int:
        count: Int = self.tables.counts[0]
        return count

    def _kv_len(self, i: Int) -> Int:
        kv_len: Int = self.tables.kv_lens[self.tables.decoding[i]]
        return kv_len

    def _first_block(self, kv_len: Int) -> Int:
        return quotient(self._keys(kv_len)[0], self.kv.sizes.keys) if self.kv.is_windowed else 0

    def _keys(self, kv_len: Int) -> tuple[Int, Int]:
        """Returns the first position that the new token sees, and the end of what the pages hold: the position of its
        own key, if that is new.
        """
        first = jnp.maximum(kv_len - self.window, 0) if self.kv.is_windowed else 0
        return first, kv_len if self.reads_only else kv_len - 1

    def _step(self, carry: _Carry) -> _Carry:
        i, block, number, loaded = carry
        before = jnp.where(number == 0, NUM_SETS - 1, number - 1)
        i, block = self._fetch((i, block), before)
        slots = [number * self.at_once + place for place in range(self.at_once)]
        j = self.items.token_blocks[slots[0]]
        self.rows.switch(j, loaded)
        for slot in slots:

            @pl.when(self.items.seqs[slot] >= 0)
            def _(slot: Int = slot) -> None:
                self.kv.wait(self.items.blocks[slot], slot, *self._keys(self.items.kv_lens[slot]))

        if not self.reads_only:
            self._take_in(slots)
            for slot in slots:
                self._write(slot)
        self.softmax.attend([self._attended(slot) for slot in slots])
        return i, block, jnp.where(number == NUM_SETS - 1, 0, number + 1), j

    def _fetch(self, place: tuple[Int, Int], number: Int) -> tuple[Int, Int]:
        """Starts to fetch the blocks from `place` on into a set of buffers; returns the place of the next one."""
        i, block = place
        first_j: Int | None = None
        for slot in [number * self.at_once + k for k in range(self.at_once)]:
            seq = self.tables.decoding[jnp.minimum(i, self._num_seqs - 1)]
            token, kv_len = self.tables.cu_q_lens[seq], self.tables.kv_lens[seq]
            j, row = quotient(token, self.rows.num_tokens), remainder(token, self.rows.num_tokens)
            first_j = j if first_j is None else first_j
            is_there = (i < self._num_seqs) & (j == first_j)
            self._record(slot, jnp.where(is_there, seq, -1), block, kv_len, j, row)
            self._settle(slot)

            @pl.when(is_there)
            def _(seq: Int = seq, block: Int = block, slot: Int = slot, kv_len: Int = kv_len) -> None:
                self.kv.fetch(seq, block, slot, *self._keys(kv_len))

            is_last = (block + 1) * self.kv.sizes.keys >= kv_len
            next_i = i + 1
            next_first = self._first_block(self._kv_len(jnp.minimum(next_i, self._num_seqs - 1)))
            block = jnp.where(is_there, jnp.where(is_last, next_first, block + 1), block)
            i = jnp.where(is_there & is_last, next_i, i)
        return i, block

    def _record(self, slot: Int, seq: Int, block: Int, kv_len: Int, j: Int, row: Int) -> None:
        self.items.seqs[slot] = seq
        self.items.blocks[slot] = block
        self.items.kv_lens[slot] = kv_len
        self.items.token_blocks[slot] = j
        self.items.rows[slot] = jnp.where(seq >= 0, row, self.rows.num_tokens)  # after all tokens: nobody reads it

    def _settle(self, slot: Int) -> None:
        """Waits for the write from a buffer, if there is one."""

        @pl.when(self.items.pending[slot] == 1)
        def _() -> None:
            self.kv.await_tile(slot)
            self.items.pending[slot] = 0

    def _new_key(self, slot: Int) -> Int:
        """Returns the row of the buffer that the new token takes; past the last row if that is in a later block."""
        row: Int = self.items.kv_lens[slot] - 1 - self.items.blocks[slot] * self.kv.sizes.keys
        return row

    def _take_in(self, slots: list[Int]) -> None:
        """Writes each new token to its row, if that is in the token's buffer.

        There are no branches, and everything is read before anything is written, so that the compiler can schedule the
        blocks of an iteration together.
        """
        num_heads, places = self.rows.num_heads, [self._place(slot) for slot in slots]
        held, new = self.kv.buffers.scales, self.rows.scales

        def take(heads: list[Int]) -> None:
            changed = [self._with_row(place, head) for place in places for head in heads]
            if held is not None and new is not None:
                changed += [self._with_scales(held, new, place, head) for place in places for head in heads]
            for rows, value in changed:
                rows[...] = value

        heads_together(num_heads, num_heads if self.at_once > 1 else 1, take)

    def _place(self, slot: Int) -> Place:
        key, sizes, tile = self._new_key(slot), self.kv.sizes, self.kv.tile_rows
        held_key = jnp.clip(key, 0, sizes.keys - 1)
        row = remainder(held_key, sizes.rows)
        start = aligned(quotient(row, tile) * tile, tile)
        return Place(slot, quotient(held_key, sizes.rows), start, jnp.where(key == held_key, row, -1))

    def _with_row(self, place: Place, head: Int) -> tuple[Ref, jax.Array]:
        """Returns the tile of a head's rows, and its contents with the new token's row."""
        rows = self.kv.buffers.codes.at[place.slot, place.piece, head, pl.ds(place.start, self.kv.tile_rows), :]
        row = jnp.where(place.row < 0, -1, place.row - place.start)
        return rows, self.kv.elements.with_row(rows[...], row, self.rows.new_row(head, self.items.rows[place.slot]))

    def _with_scales(self, held: Ref, new: Ref, place: Place, head: Int) -> tuple[Ref, jax.Array]:
        """Returns the tile of a head's scales, and its contents with those of the new token."""
        pair = new[head, pl.ds(aligned(2 * self.items.rows[place.slot], 2), 2), :]
        return with_scales(held.at[place.slot, place.piece], head, place.row, pair)

    def _write(self, slot: Int) -> None:
        """Starts to write the new token's tile back."""
        key = self._new_key(slot)

        @pl.when((self.items.seqs[slot] >= 0) & (key < self.kv.sizes.keys))
        def _() -> None:
            start = quotient(key, self.kv.tile_rows) * self.kv.tile_rows
            self.kv.write_tile(self.items.seqs[slot], self.items.blocks[slot], slot, start)
            self.items.pending[slot] = 1

    def _attended(self, slot: Int) -> Attended:
        block, kv_len = self.items.blocks[slot], self.items.kv_lens[slot]
        start = block * self.kv.sizes.keys
        first = kv_len - self.window - start if self.kv.is_windowed else None
        return Attended(slot, self.items.rows[slot], block == self._first_block(kv_len), first, kv_len - start)
