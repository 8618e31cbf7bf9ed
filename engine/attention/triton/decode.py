"""Decoding: the keys of each sequence with one query are split between programs, and a second pass joins the results.

This is flash-decoding (Dao, Haziza, Massa and Sizov, 2023). The query heads of a KV head are the rows of one tile, so
that a key is read once for all of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from penstock.engine.attention.triton.pages import PageBlocks, lanes_mask, masked_load
from penstock.engine.attention.triton.softmax import (
    MaskedScores,
    SoftmaxState,
    empty_softmax,
    log_weight,
    result,
    take_keys,
)
from penstock.engine.attention.triton.tiles import DecodeTiles, Heads
from penstock.engine.kernels.pallas import Ref
from penstock.engine.models.attention_interface import RaggedBatch

_SPLITS_AT_ONCE = 16  # splits that the second pass holds in registers


def split_work(
    batch: RaggedBatch, tiles: DecodeTiles, heads: Heads, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Splits the blocks of keys of decoding sequences into shares, the same for every KV head.

    Returns two arrays. The first, i32 [max_seqs, 5], has for each sequence its token, first block, number of blocks,
    blocks per share, and first share; a sequence that does not decode has no blocks. The second, i32 [num_shares, 2],
    has for each share its sequence, or -1 for none, and its number among the sequence's shares.

    All shares are about the same size, however long the sequences are, and there are about as many as keep the device
    busy. If all sequences have `total` blocks and a share has `most`, there are at most total / most shares beyond one
    per sequence.
    """
    max_seqs = batch.kv_lens.shape[0]
    is_decoding = (jnp.arange(max_seqs) < batch.num_seqs[0]) & (jnp.diff(batch.cu_q_lens) == 1)
    first_key = jnp.zeros_like(batch.kv_lens)
    if sliding_window is not None:
        first_key = jnp.maximum(batch.kv_lens - sliding_window, 0)
    first = first_key // tiles.keys
    count = jnp.where(is_decoding, -(-batch.kv_lens // tiles.keys) - first, 0)
    most = jnp.maximum(-(-jnp.sum(count) * heads.num_kv_heads // tiles.num_programs), 1)
    share = -(-count // jnp.maximum(-(-count // most), 1))  # evened out
    ends = jnp.cumsum(-(-count // jnp.maximum(share, 1)))
    begins = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    number = jnp.arange(tiles.num_shares)
    seq = jnp.searchsorted(ends, number, side="right", method="compare_all")  # the default is a loop of launches
    which = number - begins[jnp.minimum(seq, max_seqs - 1)]
    work = jnp.stack([batch.cu_q_lens[:-1], first, count, share, begins], axis=1)
    shares = jnp.stack([jnp.where(number < ends[-1], seq, -1), which], axis=1)
    return work.astype(jnp.int32), shares.astype(jnp.int32)


def decode_kernel(
    q: Ref,  # [num_tokens, num_heads, head_dim]
    keys: Ref,
    values: Ref,
    table: Ref,
    kv_lens: Ref,
    work: Ref,  # as from split_work
    shares: Ref,
    sinks: Ref | None,  # f32 [num_heads]
    out: Ref,  # as q
    parts: Ref,  # f32 [num_shares, num_heads, head_dim]: the result of each share, if there are several
    weights: Ref,  # f32 [num_shares, num_heads], log2: the weight of each result
    *,
    heads: Heads,
    tiles: DecodeTiles,
    scores: MaskedScores,
) -> None:
    """Attends to one share of a sequence's keys, for the query heads of one KV head."""
    kv_head, number = pl.program_id(0), pl.program_id(1)
    seq = shares[number, 0]

    @pl.when(seq >= 0)
    def attend_share() -> None:
        token, first, count, share = (work[seq, i] for i in range(4))
        begin = first + shares[number, 1] * share
        end, kv_len = jnp.minimum(begin + share, first + count), kv_lens[seq]
        blocks = PageBlocks(keys, values, table, heads, tiles.keys, seq, kv_head)
        head, is_own = _query_heads(heads, tiles, kv_head)
        lane = jnp.arange(heads.width, dtype=jnp.int32)[None, :]
        mask = lanes_mask(heads, (tiles.rows, heads.width), None if is_own is None else is_own[:, None])
        query = masked_load(q.at[token, head[:, None], lane], mask)

        def attend(block: jax.Array, state: tuple[jax.Array, SoftmaxState]) -> tuple[jax.Array, SoftmaxState]:
            pages, carry = state
            k, v = blocks.load(block, pages, kv_len)
            key = block * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            visible = jnp.broadcast_to(scores.sees(kv_len - 1, key)[None, :], (tiles.rows, tiles.keys))
            return blocks.pages(block + 1, kv_len), take_keys(carry, query, k, v, scores, visible)

        empty = empty_softmax(heads.width, sinks, head, is_own, is_first=begin == first)
        _, carry = lax.fori_loop(begin, end, attend, (blocks.pages(begin, kv_len), empty))

        @pl.when(share >= count)
        def finish() -> None:
            plgpu.store(out.at[token, head[:, None], lane], result(carry).astype(out.dtype), mask=mask)

        @pl.when(share < count)
        def leave_to_join() -> None:
            plgpu.store(parts.at[number, head[:, None], lane], result(carry), mask=mask)
            plgpu.store(weights.at[number, head], log_weight(carry), mask=is_own)


def _query_heads(heads: Heads, tiles: DecodeTiles, kv_head: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the query head of each row of a tile, [rows], and which rows have one; None: all."""
    row = jnp.arange(tiles.rows, dtype=jnp.int32)
    return kv_head * heads.group + row, None if tiles.rows == heads.group else row < heads.group


def join_kernel(
    parts: Ref,
    weights: Ref,
    work: Ref,
    _out: Ref,
    out: Ref,  # in place
    *,
    heads: Heads,
    tiles: DecodeTiles,
) -> None:
    """Joins the results of one head of one sequence, if its keys were split."""
    head, seq = pl.program_id(0), pl.program_id(1)
    token, _, count, share, number = (work[seq, i] for i in range(5))

    @pl.when(share < count)
    def join() -> None:
        num_splits = lax.div(count + share - 1, share)
        every = jnp.arange(tiles.max_splits, dtype=jnp.int32)
        found = plgpu.load(weights.at[number + every, head], mask=every < num_splits, other=-jnp.inf)
        top = jnp.max(found)
        total = jnp.sum(jnp.exp2(found - top))
        lane = jnp.arange(heads.width, dtype=jnp.int32)
        at_once = min(_SPLITS_AT_ONCE, tiles.max_splits)

        def add(i: jax.Array, values: jax.Array) -> jax.Array:
            split = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
            is_used = split < num_splits
            weight = plgpu.load(weights.at[number + split, head], mask=is_used, other=-jnp.inf)
            mask = lanes_mask(heads, (at_once, heads.width), is_used[:, None])
            part = masked_load(parts.at[number + split[:, None], head, lane[None, :]], mask)
            return values + jnp.sum(part * jnp.exp2(weight - top)[:, None], axis=0)

        turns = lax.div(num_splits + at_once - 1, at_once)
        values = lax.fori_loop(0, turns, add, jnp.zeros((heads.width,), jnp.float32))
        mask = None if heads.width == heads.head_dim else lane < heads.head_dim
        plgpu.store(out.at[token, head, lane], (values / total).astype(out.dtype), mask=mask)
