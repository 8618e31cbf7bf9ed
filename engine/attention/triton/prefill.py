"""Prefill: blocks of queries of sequences with more than one, each over the keys of its own sequence.

As in FlashAttention-2 (Dao, arXiv 2307.08691), except that the query heads of a KV head share a block: its rows are
queries times heads. Only blocks of keys at the edges of what a block of queries sees are masked.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from penstock.engine.attention.triton.pages import PageBlocks, lanes_mask, masked_load
from penstock.engine.attention.triton.softmax import MaskedScores, SoftmaxState, empty_softmax, result, take_keys
from penstock.engine.attention.triton.tiles import Heads, PrefillTiles
from penstock.engine.kernels.pallas import Ref
from penstock.engine.models.attention_interface import RaggedBatch


def query_blocks(batch: RaggedBatch, tiles: PrefillTiles) -> jax.Array:
    """Returns the sequence of each block of queries, or -1 for none, and its first query: i32 [num_blocks, 2].

    The last block of a sequence comes first: it has the most keys to attend to.
    """
    is_real = jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]
    q_lens = jnp.diff(batch.cu_q_lens)
    ends = jnp.cumsum(jnp.where(is_real & (q_lens > 1), -(-q_lens // tiles.queries), 0))
    block = jnp.arange(tiles.num_blocks)
    seq = jnp.searchsorted(ends, block, side="right", method="compare_all")  # the default is a loop of launches
    number = ends[jnp.minimum(seq, ends.shape[0] - 1)] - 1 - block
    return jnp.stack([jnp.where(block < ends[-1], seq, -1), number * tiles.queries], axis=1).astype(jnp.int32)


def prefill_kernel(
    q: Ref,  # [num_tokens, num_heads, head_dim]
    keys: Ref,
    values: Ref,
    table: Ref,
    kv_lens: Ref,
    cu_q_lens: Ref,
    blocks: Ref,  # as from query_blocks
    _out: Ref,
    sinks: Ref | None,  # f32 [num_heads]
    out: Ref,  # as q, in place
    *,
    heads: Heads,
    tiles: PrefillTiles,
    scores: MaskedScores,
) -> None:
    """Attends for a block of queries of one sequence, for the query heads of one KV head."""
    kv_head, block = pl.program_id(0), pl.program_id(1)
    seq, offset = blocks[block, 0], blocks[block, 1]

    @pl.when(seq >= 0)
    def attend_block() -> None:
        start, kv_len = cu_q_lens[seq], kv_lens[seq]
        q_len = cu_q_lens[seq + 1] - start
        row = jnp.arange(tiles.rows, dtype=jnp.int32)
        query = offset + lax.div(row, heads.group)
        is_own = (query < q_len) & (row < tiles.queries * heads.group)
        head = kv_head * heads.group + lax.rem(row, heads.group)
        at = (start + query[:, None], head[:, None], jnp.arange(heads.width, dtype=jnp.int32)[None, :])
        mask = lanes_mask(heads, (tiles.rows, heads.width), is_own[:, None])
        rows = masked_load(q.at[at], mask)
        kv = PageBlocks(keys, values, table, heads, tiles.keys, seq, kv_head)
        before = kv_len - q_len  # tokens of the sequence from earlier steps
        position = before + query

        def attend(
            number: jax.Array, state: tuple[jax.Array, SoftmaxState], *, is_edge: bool
        ) -> tuple[jax.Array, SoftmaxState]:
            pages, carry = state
            k, v = kv.load(number, pages, kv_len if is_edge else None)
            key = number * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            visible = scores.sees(position[:, None], key[None, :]) if is_edge else None
            return kv.pages(number + 1, kv_len), take_keys(carry, rows, k, v, scores, visible)

        first, last = before + offset, before + jnp.minimum(offset + tiles.queries, q_len) - 1
        bounds = _seen_blocks(first, last, tiles.keys, scores.sliding_window)
        state = (kv.pages(bounds[0], kv_len), empty_softmax(heads.width, sinks, head))
        if scores.sliding_window is not None:
            state = lax.fori_loop(bounds[0], bounds[1], partial(attend, is_edge=True), state)
        state = lax.fori_loop(bounds[1], bounds[2], partial(attend, is_edge=False), state)
        _, carry = lax.fori_loop(bounds[2], bounds[3], partial(attend, is_edge=True), state)
        plgpu.store(out.at[at], result(carry).astype(out.dtype), mask=mask)


def _seen_blocks(
    first: jax.Array, last: jax.Array, size: int, sliding_window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the bounds of the blocks of keys that queries at the positions `first` to `last` see.

    The bounds are: the first block, the first and the end of those that all queries see whole, and the end.
    """
    end = lax.div(last, size) + 1
    all_end = lax.div(first + 1, size)
    begin = all_begin = jnp.zeros_like(end)
    if sliding_window is not None:
        begin = lax.div(jnp.maximum(first - sliding_window + 1, 0), size)
        all_begin = lax.div(jnp.maximum(last - sliding_window + 1, 0) + size - 1, size)
        all_begin = jnp.minimum(all_begin, end)
    return begin, all_begin, jnp.maximum(all_begin, all_end), end
