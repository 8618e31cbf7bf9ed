"""Decoding: the sequences with one query.

Their blocks of keys are one list, sequence after sequence. An iteration takes several blocks of it, whosever they are,
while those of the next iterations are fetched: so short sequences share what an iteration costs, and a long one waits
for none. All blocks of an iteration have their tokens in one block of tokens; places behind them stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.decode_softmax import Attended, DecodeSoftmax
from penstock.engine.attention.fused.pages import PageBuffers, Tables, quotient, remainder
from penstock.engine.attention.fused.scales import put_scales
from penstock.engine.attention.fused.softmax import Int, aligned, each_head
from penstock.engine.attention.fused.token_rows import TokenRows
from penstock.engine.attention.fused.tokens import row_of
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
            for slot in slots:
                self._take_in(slot)
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
        self.items.rows[slot] = jnp.where(seq >= 0, row, self.rows.num_tokens)  # behind all tokens: nobody's

    def _settle(self, slot: Int) -> None:
        """Waits for the write from a buffer, if there is one."""

        @pl.when(self.items.pending[slot] == 1)
        def _() -> None:
            self.kv.await_tile(slot)
            self.items.pending[slot] = 0

    def _new_key(self, slot: Int) -> Int:
        """Returns the row of the buffer that the new token takes, or what is no row of it."""
        row: Int = self.items.kv_lens[slot] - 1 - self.items.blocks[slot] * self.kv.sizes.keys
        return row

    def _take_in(self, slot: Int) -> None:
        """Writes the new token to its row of the buffer, if that is there.

        There is no branch, so the blocks of an iteration are scheduled together.
        """
        key, sizes, tile = self._new_key(slot), self.kv.sizes, self.kv.tile_rows
        held_key = jnp.clip(key, 0, sizes.keys - 1)
        piece, place = quotient(held_key, sizes.rows), remainder(held_key, sizes.rows)
        start = aligned(quotient(place, tile) * tile, tile)
        is_new = lax.broadcasted_iota(jnp.int32, (tile, 1), 0) == jnp.where(key == held_key, place - start, -1)

        def take(head: Int) -> None:
            rows = self.kv.buffers.codes.at[slot, piece, head, pl.ds(start, tile), :]
            new = self.rows.new_row(head, self.items.rows[slot])
            rows[...] = jnp.where(is_new, new, rows[...].astype(jnp.float32)).astype(rows.dtype)

        heads_at_once = self.rows.num_heads if self.at_once > 1 else 1
        each_head(self.rows.num_heads, heads_at_once, take)
        if self.kv.buffers.scales is not None and self.rows.tokens.scales is not None:
            row = row_of(self.rows.tokens.scales, 0, jnp.minimum(self.items.rows[slot], self.rows.num_tokens - 1))
            put_scales(
                self.kv.buffers.scales.at[slot, piece], jnp.where(key == held_key, place, -1), row, heads_at_once
            )

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
