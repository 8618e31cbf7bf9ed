"""Prefill: the sequences with more than one query, one block of queries after the other.

Blocks of queries are the same for all sequences: `num_queries` consecutive tokens of the step each. A block in which
two sequences meet is processed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.attention.fused.pages import PageBuffers, Tables, quotient
from penstock.engine.attention.fused.prefill_softmax import PrefillSoftmax
from penstock.engine.attention.fused.scales import place_scales
from penstock.engine.attention.fused.softmax import Int, aligned, each_head, place_rows
from penstock.engine.attention.fused.tokens import TokenBlock

_Carry = tuple[Int, Int, Int, Int, Int, Int]
"""Index in the list of prefilling sequences, block of queries, block of keys, buffer, block of queries in VMEM, and
whether the softmax holds a part (0 or 1).
"""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a sequence in a block of queries."""

    seq: Int
    first: Int  # of the step's tokens
    end: Int
    shift: Int  # what to add to a token's number in the step to get its position in the sequence


@dataclass(frozen=True, slots=True)
class Prefill:
    tables: Tables
    kv: PageBuffers
    softmax: PrefillSoftmax
    tokens: TokenBlock
    pieces_at_once: int
    window: int | None
    reads_only: bool  # the pages already hold the step's keys and values

    def run(self) -> None:
        @pl.when(self._num_seqs > 0)
        def _() -> None:
            self.kv.clear(self.softmax.layout.value_start)
            self.tokens.out[...] = jnp.zeros_like(self.tokens.out)
            j = self._first_queries(0)
            block = self._first_block(0, j)
            self._fetch(0, j, block, 0)
            first: _Carry = (jnp.int32(0), j, block, jnp.int32(0), jnp.int32(-1), jnp.int32(0))
            last = lax.while_loop(lambda carry: carry[0] < self._num_seqs, self._step, first)
            self.tokens.store(last[4])

    @property
    def _num_seqs(self) -> Int:
        count: Int = self.tables.counts[1]
        return count

    @property
    def _keys_at_once(self) -> int:
        return self.pieces_at_once * self.kv.sizes.rows

    def _step(self, carry: _Carry) -> _Carry:
        i, j, block, slot, loaded, holds = carry
        span = self._span(i, j)
        self.tokens.switch(j, loaded, keeps=self.tables.counts[0] > 0)  # decoding sequences may have results there

        @pl.when(block == self._first_block(i, j))
        def _() -> None:
            self.softmax.start()

        self.kv.wait(block, slot, *self._keys(span))
        if not self.reads_only:
            self._take_in(span, j, block, slot)
        is_last = (block + 1) * self.kv.sizes.keys >= span.end + span.shift
        next_i, next_j, next_block = self._next(span, is_last, i, j, block)

        @pl.when(next_i < self._num_seqs)
        def _() -> None:
            self._fetch(next_i, next_j, next_block, 1 - slot)

        holds = self._attend(span, j, block, slot, holds, is_last)

        @pl.when(is_last)
        def _() -> None:
            self._finish(span, j)

        return next_i, next_j, next_block, 1 - slot, j, holds

    def _next(self, span: Span, is_last: Int, i: Int, j: Int, block: Int) -> tuple[Int, Int, Int]:
        """Returns the next block of keys; after the last, the next block of queries, of this sequence or of the next
        one.
        """
        is_done = span.end == self.tables.cu_q_lens[span.seq + 1]
        next_i = jnp.where(is_last & is_done, i + 1, i)
        peek = jnp.minimum(next_i, self._num_seqs - 1)
        next_j = jnp.where(is_last, jnp.where(is_done, self._first_queries(peek), j + 1), j)
        return next_i, next_j, jnp.where(is_last, self._first_block(peek, next_j), block + 1)

    def _span(self, i: Int, j: Int) -> Span:
        seq = self.tables.prefilling[i]
        start, end = self.tables.cu_q_lens[seq], self.tables.cu_q_lens[seq + 1]
        num = self.tokens.num_queries
        return Span(seq, jnp.maximum(start, j * num), jnp.minimum(end, (j + 1) * num), self.tables.kv_lens[seq] - end)

    def _first_queries(self, i: Int) -> Int:
        return quotient(self.tables.cu_q_lens[self.tables.prefilling[i]], self.tokens.num_queries)

    def _first_block(self, i: Int, j: Int) -> Int:
        first, _ = self._keys(self._span(i, j))
        return quotient(first, self.kv.sizes.keys)

    def _keys(self, span: Span) -> tuple[Int, Int]:
        """Returns the first position that any of the queries sees, and the end of what the pages hold: the position of
        the first query, if keys are new from there on.
        """
        position = span.first + span.shift
        end = span.end + span.shift if self.reads_only else position
        return 0 if self.window is None else jnp.maximum(position - self.window + 1, 0), end

    def _fetch(self, i: Int, j: Int, block: Int, slot: Int) -> None:
        span = self._span(i, j)
        self.kv.fetch(span.seq, block, slot, *self._keys(span))

    def _take_in(self, span: Span, j: Int, block: Int, slot: Int) -> None:
        """Writes the new tokens that fall into this block of keys to the buffer, and their tiles back to the pages."""
        num_keys = self.kv.sizes.keys
        shift = span.shift - block * num_keys  # from token numbers to rows of the buffer
        first_row, end_row = span.first + shift, span.end + shift

        @pl.when((end_row > 0) & (first_row < num_keys))
        def _() -> None:
            self._each_part(first_row, end_row, lambda part: self._merge(span, j, slot, part, shift))
            self.kv.write_rows(span.seq, block, slot, first_row, end_row)

    def _merge(self, span: Span, j: Int, slot: Int, part: Int, shift: Int) -> None:
        """Moves each token to its row in a part of the buffer, by a matmul with a matrix of ones and zeros."""
        num_rows, num_queries = self._keys_at_once, self.tokens.num_queries
        row = part + lax.broadcasted_iota(jnp.int32, (num_rows, num_queries), 0)
        token = j * num_queries + lax.broadcasted_iota(jnp.int32, (num_rows, num_queries), 1)
        is_here = (token + shift == row) & (token >= span.first) & (token < span.end)
        place = jnp.where(is_here, 1.0, 0.0).astype(self.tokens.new.dtype)
        row = part + lax.broadcasted_iota(jnp.int32, (num_rows, self.tokens.new.shape[2]), 0)
        is_new = (row >= span.first + shift) & (row < span.end + shift)
        token = j * num_queries + lax.broadcasted_iota(jnp.int32, self.tokens.new.shape[1:], 0)
        is_own = (token >= span.first) & (token < span.end)  # a NaN of another sequence would survive the zeros

        pieces = self._pieces(part)

        def merge(head: Int) -> None:
            rows = self.kv.buffers.codes.at[slot, pieces, head]
            new = self.tokens.new[head]
            new = jnp.where(is_own, new, jnp.zeros_like(new))
            held = self.kv.elements.widened(rows[...].reshape(num_rows, -1))
            merged = jnp.where(is_new, place_rows(place, new), held)
            rows[...] = self.kv.elements.narrowed(merged).reshape(rows.shape)

        each_head(self.tokens.num_heads, 1, merge)
        if self.kv.buffers.scales is not None and self.tokens.scales is not None:
            scales = jnp.where(is_own[:, :1], self.tokens.scales[...], 0.0)
            lane = part + lax.broadcasted_iota(jnp.int32, (2, num_rows), 1)
            is_new = (lane >= span.first + shift) & (lane < span.end + shift)
            held = self.kv.buffers.scales.at[slot, pieces]
            place_scales(held, scales, jnp.where(is_here, 1.0, 0.0), is_new)

    def _attend(self, span: Span, j: Int, block: Int, slot: Int, holds: Int, is_last: Int) -> Int:
        """Attends to a block. Returns whether the softmax holds a part of it: after the last block it does not."""
        if self.window is not None and self.window <= self.kv.sizes.keys:  # no token sees all of a block
            self._attend_to_parts(span, j, block, slot, None)
            return holds
        parts, start = range(0, self.kv.sizes.keys, self._keys_at_once), block * self.kv.sizes.keys
        is_whole = jnp.logical_not(is_last) & (start + self.kv.sizes.keys <= span.first + span.shift + 1)
        if self.window is not None:
            is_whole &= start > span.end - 1 + span.shift - self.window

        for with_held in (False, True):

            @pl.when(is_whole & (holds == int(with_held)))
            def _(with_held: bool = with_held) -> None:
                pieces = [self._pieces(part) for part in parts]
                self.softmax.take_whole(slot, pieces, with_held=with_held)

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            self._attend_to_parts(span, j, block, slot, holds)

        return is_whole.astype(jnp.int32)

    def _attend_to_parts(self, span: Span, j: Int, block: Int, slot: Int, holds: Int | None) -> None:
        """Attends to what the tokens see of a block, and to the part that is held. Rows of other sequences' tokens get
        values that are never read.
        """
        num_queries, start = self.tokens.num_queries, block * self.kv.sizes.keys
        num_rows = num_queries * self.tokens.group

        def attend(part: Int, *, with_held: bool = False) -> None:
            key = lax.broadcasted_iota(jnp.int32, (self._keys_at_once, num_rows), 0)
            row = lax.broadcasted_iota(jnp.int32, (1, num_rows), 1)
            position = row % num_queries + (j * num_queries + span.shift - start - part)  # from the part's first key on
            visible = key <= position
            if self.window is not None:
                visible &= key > position - self.window
            self.softmax.take(slot, self._pieces(part), visible, with_held=with_held)

        first, end = self._keys(span)[0] - start, span.end + span.shift - start
        if holds is not None:

            @pl.when(holds == 1)
            def _() -> None:  # the block before was whole, so this one is seen from its beginning
                attend(0, with_held=True)

            first = jnp.maximum(first, holds * self._keys_at_once)
        self._each_part(first, end, attend)

    def _pieces(self, part: Int) -> Any:
        return pl.ds(quotient(part, self.kv.sizes.rows), self.pieces_at_once)

    def _each_part(self, first_row: Int, end_row: Int, work: Callable[[Int], None]) -> None:
        """Calls `work` with the first row of each part of the buffer that holds any of these rows."""
        rows = self._keys_at_once
        first = quotient(jnp.maximum(first_row, 0), rows)
        end = quotient(jnp.maximum(jnp.minimum(end_row, self.kv.sizes.keys), 0) + rows - 1, rows)
        lax.fori_loop(first, end, lambda i, _: work(aligned(i * rows, rows)), None)

    def _finish(self, span: Span, j: Int) -> None:
        """Merges the sequence's rows with those of other sequences in this block of queries."""
        out = self.tokens.out
        num_queries = self.tokens.num_queries
        token = j * num_queries + lax.broadcasted_iota(jnp.int32, out.shape[1:], 0) % num_queries
        is_own = (token >= span.first) & (token < span.end)

        def merge(head: Int) -> None:
            merged = jnp.where(is_own, self.softmax.result(head), out[head].astype(jnp.float32))
            out[head] = merged.astype(out.dtype)

        each_head(self.tokens.num_heads, 1, merge)
