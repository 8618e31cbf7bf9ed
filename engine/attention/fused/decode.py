"""The sequences with one query, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.pages import PageBlocks, Tables
from penstock.engine.attention.fused.softmax import Int, Ref, Softmax, aligned, each_head

Carry = tuple[Int, Int, Int]  # place in the list of decoding sequences, block of keys, buffer


@dataclass(frozen=True, slots=True)
class Decode:
    tables: Tables
    kv: PageBlocks
    state: Softmax
    q: Ref  # [max_seqs, num_kv_heads, decode rows, query width]
    new: Ref  # f32 [max_seqs, num_kv_heads, width]
    out: Ref  # as q
    pending: Ref  # [2]: 1 where a write out of the buffer is under way

    def run(self) -> None:
        @pl.when(self._num_seqs > 0)
        def _() -> None:
            self.pending[0] = 0
            self.pending[1] = 0
            first: Carry = (jnp.int32(0), self._first_block(0), jnp.int32(0))
            self._fetch(*first)
            lax.while_loop(lambda carry: carry[0] < self._num_seqs, self._step, first)
            self._settle(0)
            self._settle(1)

    @property
    def _num_seqs(self) -> Int:
        count: Int = self.tables.info[0]
        return count

    @property
    def _num_heads(self) -> int:
        return int(self.new.shape[1])

    def _step(self, carry: Carry) -> Carry:
        i, block, slot = carry
        num_keys = self.kv.blocks.keys
        seq = self.tables.decoding[i]
        kv_len = self.tables.kv_lens[seq]
        is_last = (block + 1) * num_keys >= kv_len
        next_i = jnp.where(is_last, i + 1, i)
        next_block = jnp.where(is_last, self._first_block(jnp.minimum(i + 1, self._num_seqs - 1)), block + 1)

        @pl.when(next_i < self._num_seqs)
        def _() -> None:
            self._fetch(next_i, next_block, 1 - slot)

        @pl.when(block == self._first_block(i))
        def _() -> None:
            self.state.start()

        self.kv.wait(seq, block, slot, kv_len - 1)

        @pl.when(is_last)
        def _() -> None:
            self._take_in(seq, block, slot, kv_len - 1 - block * num_keys)

        self._attend(seq, block, slot, kv_len)

        @pl.when(is_last)
        def _() -> None:
            self._finish(seq)

        return next_i, next_block, 1 - slot

    def _first_block(self, i: Int) -> Int:
        first: Int = jnp.maximum(self.tables.kv_lens[self.tables.decoding[i]] - self.tables.info[3], 0)
        return first // self.kv.blocks.keys

    def _fetch(self, i: Int, block: Int, slot: Int) -> None:
        self._settle(slot)
        seq = self.tables.decoding[i]
        self.kv.fetch(seq, block, slot, self.tables.kv_lens[seq] - 1)  # the last key is the new one

    def _settle(self, slot: Int) -> None:
        """Waits for the write out of a buffer, if there is one."""

        @pl.when(self.pending[slot] == 1)
        def _() -> None:
            self.kv.tile_write(0, 0, slot, 0).wait()
            self.pending[slot] = 0

    def _take_in(self, seq: Int, block: Int, slot: Int, row: Int) -> None:
        """Puts the new token at `row` of the buffer, and starts to write its tile back."""
        tile = self.kv.blocks.tile_rows
        start = aligned(row // tile * tile, tile)
        is_new = lax.broadcasted_iota(jnp.int32, (tile, self.new.shape[2]), 0) == row - start
        for head in range(self._num_heads):
            rows = self.kv.buffer.at[slot, head, pl.ds(start, tile), :]
            merged = jnp.where(is_new, self.new[seq, head : head + 1, :], rows[...].astype(jnp.float32))
            rows[...] = merged.astype(self.kv.buffer.dtype)
        self.kv.tile_write(seq, block, slot, start).start()
        self.pending[slot] = 1

    def _attend(self, seq: Int, block: Int, slot: Int, kv_len: Int) -> None:
        shape = (self.kv.blocks.decode_rows, self.kv.blocks.keys)
        key = block * self.kv.blocks.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = (key < kv_len) & (key >= kv_len - self.tables.info[3])

        def attend(head: Int) -> None:
            self.state.take(head, self.q[seq, head], self.kv.buffer.at[slot, head], visible)

        each_head(self._num_heads, self.kv.blocks.heads_at_once, attend)

    def _finish(self, seq: Int) -> None:
        def finish(head: Int) -> None:
            self.out[seq, head] = self.state.result(head).astype(self.out.dtype)

        each_head(self._num_heads, self.kv.blocks.heads_at_once, finish)
