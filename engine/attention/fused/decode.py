"""Decoding: the sequences with one query, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.pages import PageBuffers, Tables
from penstock.engine.attention.fused.scales import put_scales
from penstock.engine.attention.fused.softmax import Int, Softmax, aligned, each_head
from penstock.engine.attention.fused.tokens import TokenBlock, row_of
from penstock.engine.kernels.pallas import Ref

_Carry = tuple[Int, Int, Int, Int]  # place in the list of decoding sequences, block of keys, buffer, block of tokens


@dataclass(frozen=True, slots=True)
class Decode:
    tables: Tables
    kv: PageBuffers
    state: Softmax
    tokens: TokenBlock
    q: Ref  # [num_kv_heads, decode rows, query width]: the sequence's queries
    pending: Ref  # [2]: 1 while a write from the buffer is in flight
    window: int
    reads_only: bool  # the pages already hold the step's keys and values

    def run(self) -> None:
        @pl.when(self._num_seqs > 0)
        def _() -> None:
            self.pending[0] = 0
            self.pending[1] = 0
            block = self._first_block(0)
            self._fetch(jnp.int32(0), block, jnp.int32(0))
            first: _Carry = (jnp.int32(0), block, jnp.int32(0), jnp.int32(-1))
            last = lax.while_loop(lambda carry: carry[0] < self._num_seqs, self._step, first)
            self.tokens.store(last[3])
            self._settle(0)
            self._settle(1)

    @property
    def _num_seqs(self) -> Int:
        count: Int = self.tables.counts[0]
        return count

    def _step(self, carry: _Carry) -> _Carry:
        i, block, slot, loaded = carry
        num_keys = self.kv.blocks.keys
        seq = self.tables.decoding[i]
        kv_len = self.tables.kv_lens[seq]
        j, row = self._place(seq)
        is_last = (block + 1) * num_keys >= kv_len
        next_i = jnp.where(is_last, i + 1, i)
        next_block = jnp.where(is_last, self._first_block(jnp.minimum(i + 1, self._num_seqs - 1)), block + 1)

        @pl.when(next_i < self._num_seqs)
        def _() -> None:
            self._fetch(next_i, next_block, 1 - slot)

        @pl.when(block == self._first_block(i))
        def _() -> None:
            self.tokens.switch(j, loaded, keeps=False)
            self._start(row)

        self.kv.wait(seq, block, slot, *self._keys(kv_len))

        if not self.reads_only:

            @pl.when(is_last)
            def _() -> None:
                self._take_in(seq, block, slot, kv_len - 1 - block * num_keys, row)

        self._attend(block, slot, kv_len)

        @pl.when(is_last)
        def _() -> None:
            self._finish(row)

        return next_i, next_block, 1 - slot, j

    def _place(self, seq: Int) -> tuple[Int, Int]:
        """Returns the block of tokens that holds the sequence's token, and the row in it."""
        token, num = self.tables.cu_q_lens[seq], self.tokens.num_queries
        return token // num, token % num

    def _first_block(self, i: Int) -> Int:
        first, _ = self._keys(self.tables.kv_lens[self.tables.decoding[i]])
        return first // self.kv.blocks.keys

    def _keys(self, kv_len: Int) -> tuple[Int, Int]:
        """Returns the first position that the new token sees, and the end of what the pages hold: the position of its
        own key, if that is new.
        """
        return jnp.maximum(kv_len - self.window, 0), kv_len if self.reads_only else kv_len - 1

    def _fetch(self, i: Int, block: Int, slot: Int) -> None:
        self._settle(slot)
        seq = self.tables.decoding[i]
        self.kv.fetch(seq, block, slot, *self._keys(self.tables.kv_lens[seq]))

    def _settle(self, slot: Int) -> None:
        """Waits for the write from a buffer, if there is one."""

        @pl.when(self.pending[slot] == 1)
        def _() -> None:
            self.kv.await_tile(slot)
            self.pending[slot] = 0

    def _start(self, row: Int) -> None:
        self.state.start()

        def take(head: Int) -> None:
            rows = self.tokens.rows_of_heads(self.tokens.q, head, row, self.q.shape[1])
            self.q[head] = rows.astype(self.q.dtype)

        each_head(self.tokens.num_heads, 1, take)

    def _take_in(self, seq: Int, block: Int, slot: Int, key: Int, row: Int) -> None:
        """Writes the new token to row `key` of the buffer, and starts to write its tile back."""
        tile = self.kv.blocks.tile_rows
        start = aligned(key // tile * tile, tile)
        is_new = lax.broadcasted_iota(jnp.int32, (tile, 1), 0) == key - start

        def take(head: Int) -> None:
            rows = self.kv.buffer.at[slot, head, pl.ds(start, tile), :]
            new = row_of(self.tokens.new.at[head], 0, row)
            rows[...] = jnp.where(is_new, new, rows[...].astype(jnp.float32)).astype(self.kv.buffer.dtype)

        each_head(self.tokens.num_heads, 1, take)
        if self.kv.scales is not None and self.tokens.scales is not None:
            put_scales(self.kv.scales.buffer.at[slot], key, row_of(self.tokens.scales, 0, row))
        self.kv.write_tile(seq, block, slot, start)
        self.pending[slot] = 1

    def _attend(self, block: Int, slot: Int, kv_len: Int) -> None:
        shape = (self.kv.blocks.decode_rows, self.kv.blocks.keys)
        key = block * self.kv.blocks.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = (key < kv_len) & (key >= kv_len - self.window)

        def attend(head: Int) -> None:
            self.state.take(head, self.q[head], self.kv.keys_of(slot, head, 0, self.kv.blocks.keys), visible)

        each_head(self.tokens.num_heads, self.kv.blocks.heads_at_once, attend)

    def _finish(self, row: Int) -> None:
        each_head(self.tokens.num_heads, 1, lambda head: self.tokens.put_rows(head, row, self.state.result(head)))
