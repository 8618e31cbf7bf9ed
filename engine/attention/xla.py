"""Ragged paged attention in plain XLA: correct on every device, made for CPU.

There are two loops with online softmax (Milakov and Gimelshein, arXiv 1805.02867), neither of which gathers more than a
few pages at a time. Sequences with one query, which decode, advance together page by page, up to the longest of them.
Sequences with more queries, which prefill, advance one block of queries at a time, each only over its own pages. Both
loops have dynamic trip counts, so that a step of one kind pays nothing for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from penstock.engine.attention.contract import (
    PLAIN,
    AttentionBackend,
    CacheArray,
    KVCacheSpec,
    transposed_keys,
)
from penstock.engine.attention.quantization import QUANTIZED_DTYPES, dequantized, quantized_kv
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, LayerCache, RaggedBatch


class _Pages(NamedTuple):
    """The pages of a layer."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None  # f32 [pages, num_kv_heads, page_size], only for codes
    value_scales: jax.Array | None = None


_Carry = tuple[jax.Array, jax.Array, jax.Array]  # running maximum, running sum, running weighted values

_MASKED = -1e30  # finite, so that a fully masked row stays free of NaN
_QUERIES_PER_BLOCK = 64
_KEYS_PER_CHUNK = 128


class XlaAttention(AttentionBackend):
    """Attention in plain XLA.

    Keys are `[pages, num_kv_heads, head_dim, page_size]`, values `[pages, num_kv_heads, page_size, head_dim]`. Both
    matmuls of the decode loop then reduce over an axis other than the minor one, which XLA on CPU vectorises. 8-bit
    codes are followed by scales, `[pages, num_kv_heads, page_size]`.
    """

    name = "xla"
    is_stacked = False
    quantized_dtypes = QUANTIZED_DTYPES

    def __init__(self, platform: str | None = None, *, kv_dtype: str | None = None) -> None:
        """Creates the backend for devices of `platform`, by default this process's, and pages of `kv_dtype`, by default
        what suits the platform.
        """
        self._platform = platform or jax.default_backend()
        self._kv_dtype = kv_dtype

    def cache_dtype(self, dtype: str) -> str:
        if self._kv_dtype is not None:
            return self._kv_dtype
        # XLA on CPU reads bfloat16 element-wise at a tenth of the speed of float32, which outweighs twice the bytes.
        return "float32" if self._platform == "cpu" else dtype

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[tuple[CacheArray, ...], ...]:
        return transposed_keys(spec)

    def __call__(
        self,
        qkv: QKV,
        cache: LayerCache,
        batch: RaggedBatch,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = qkv
        pages = _Pages(*cache)
        if k is not None and v is not None:
            pages = _written(pages, k, v, batch.slots, kv_scales)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        grouped = q.reshape(q.shape[0], num_kv_heads, -1, head_dim) * options.scale_for(head_dim)
        grouped = grouped.astype(q.dtype)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
        attended = _attend_decoding(grouped, pages, batch, options, sinks)
        attended = _attend_prefilling(grouped, pages, batch, options, sinks, attended)
        return attended.reshape(q.shape), tuple(array for array in pages if array is not None)


def _written(pages: _Pages, k: jax.Array, v: jax.Array, slots: jax.Array, kv_scales: KVScales | None) -> _Pages:
    """Returns the pages with this step's keys and values.

    What an earlier sequence left in a page is masked. Masking replaces a score that is NaN because of such a key, but a
    NaN among the values would survive a weight of 0, so none is written. Within a sequence, keys pass a NaN on.
    """
    page_size = pages.keys.shape[-1]
    page, place = slots // page_size, slots % page_size
    if pages.key_scales is None or pages.value_scales is None:
        keys = pages.keys.at[page, :, :, place].set(k.astype(pages.keys.dtype))
        return _Pages(keys, pages.values.at[page, :, place, :].set(jnp.nan_to_num(v).astype(pages.values.dtype)))
    (key_codes, key_scales), (value_codes, value_scales) = quantized_kv(k, v, pages.keys.dtype, kv_scales)
    return _Pages(
        pages.keys.at[page, :, :, place].set(key_codes),
        pages.values.at[page, :, place, :].set(value_codes),
        pages.key_scales.at[page, :, place].set(key_scales),
        pages.value_scales.at[page, :, place].set(value_scales),
    )


def _attend_decoding(
    q: jax.Array,  # [num_tokens, num_kv_heads, group, head_dim]
    pages: _Pages,
    batch: RaggedBatch,
    options: AttentionOptions,
    sinks: jax.Array | None,  # f32 [num_kv_heads, group]
) -> jax.Array:
    """Returns values for the tokens of sequences with one query, zeros for the others; shaped like `q`."""
    page_size = pages.keys.shape[-1]
    is_real = jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]
    is_decoding = is_real & (jnp.diff(batch.cu_q_lens) == 1)
    kv_lens = jnp.where(is_decoding, batch.kv_lens, 0)  # [max_seqs]
    window = options.sliding_window
    first_key = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    rows = q[jnp.minimum(batch.cu_q_lens[:-1], q.shape[0] - 1)]  # [max_seqs, num_kv_heads, group, head_dim]
    rows = rows.astype(jnp.float32)

    def attend_page(i: jax.Array, carry: _Carry) -> _Carry:
        page = jax.lax.dynamic_index_in_dim(batch.page_indices, i, axis=1, keepdims=False)  # [max_seqs]
        key = i * page_size + jnp.arange(page_size)
        visible = (key[None] < kv_lens[:, None]) & (key[None] >= first_key[:, None])  # [max_seqs, page_size]
        k, v = (dequantized(held[page], rows.dtype) for held in (pages.keys, pages.values))
        scores = jnp.sum(rows[..., None] * k[:, :, None], axis=3, dtype=jnp.float32)  # [..., group, page_size]
        if pages.key_scales is not None:
            scores *= pages.key_scales[page][:, :, None]
        scores, visible = _capped(scores, options.soft_cap), visible[:, None, None]
        weights, correction, new_top, new_total = _soften(scores, visible, *carry[:2])
        if pages.value_scales is not None:
            weights *= pages.value_scales[page][:, :, None]
        update = jnp.sum(weights[..., None] * v[:, :, None], axis=3, dtype=jnp.float32)
        return new_top, new_total, carry[2] * correction + update

    first_page = jnp.min(jnp.where(is_decoding, first_key, 2**31 - 1)) // page_size
    end_page = -(-jnp.max(kv_lens) // page_size)
    empty = _empty_softmax(rows.shape, sinks)
    _, total, gathered = jax.lax.fori_loop(jnp.minimum(first_page, end_page), end_page, attend_page, empty)
    gathered = (gathered / jnp.maximum(total, 1e-30)).astype(q.dtype)
    targets = jnp.where(is_decoding, batch.cu_q_lens[:-1], q.shape[0])  # out of bounds: dropped
    return jnp.zeros_like(q).at[targets].set(gathered, mode="drop")


def _attend_prefilling(
    q: jax.Array,  # [num_tokens, num_kv_heads, group, head_dim]
    pages: _Pages,
    batch: RaggedBatch,
    options: AttentionOptions,
    sinks: jax.Array | None,  # f32 [num_kv_heads, group]
    out: jax.Array,  # shaped as q
) -> jax.Array:
    """Fills the rows of `out` that belong to sequences with more than one query."""
    num_tokens = q.shape[0]
    pages_per_chunk = max(1, min(_KEYS_PER_CHUNK // pages.keys.shape[-1], batch.page_indices.shape[1]))
    padded_pages = jnp.pad(batch.page_indices, ((0, 0), (0, -batch.page_indices.shape[1] % pages_per_chunk)))
    block = min(_QUERIES_PER_BLOCK, num_tokens)
    blocked_q = jnp.pad(q, ((0, block), (0, 0), (0, 0), (0, 0)))

    is_real = jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]
    q_lens = jnp.diff(batch.cu_q_lens)
    ends = jnp.cumsum(jnp.where(is_real & (q_lens > 1), -(-q_lens // block), 0))  # blocks up to each sequence's end

    def attend_block(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.searchsorted(ends, i, side="right")
        blocks_before = jnp.where(seq > 0, ends[jnp.maximum(seq - 1, 0)], 0)
        offset = (i - blocks_before) * block
        start = batch.cu_q_lens[seq] + offset
        position = batch.kv_lens[seq] - q_lens[seq] + offset + jnp.arange(block)  # of each query in its sequence
        is_own = offset + jnp.arange(block) < q_lens[seq]
        rows = jax.lax.dynamic_slice_in_dim(blocked_q, start, block)
        last = jnp.minimum(position[-1], batch.kv_lens[seq] - 1)

        def pages_of(chunk: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(padded_pages, (seq, chunk * pages_per_chunk), (1, pages_per_chunk))[0]

        gathered = _attend_queries(rows, position, last, pages, pages_of, pages_per_chunk, options, sinks)
        before = jax.lax.dynamic_slice_in_dim(out, start, block)
        merged = jnp.where(is_own[:, None, None, None], gathered.astype(out.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(out, merged, start, axis=0)

    padded_out = jnp.pad(out, ((0, block), (0, 0), (0, 0), (0, 0)))
    filled: jax.Array = jax.lax.fori_loop(0, ends[-1], attend_block, padded_out)
    return filled[:num_tokens]


def _attend_queries(
    q: jax.Array,  # [block, num_kv_heads, group, head_dim]: consecutive queries of one sequence
    position: jax.Array,  # i32 [block]: of each query in its sequence
    last: jax.Array,  # i32: the last position of the sequence that any of them sees
    pages: _Pages,
    pages_of: Callable[[jax.Array], jax.Array],  # a chunk's
    pages_per_chunk: int,
    options: AttentionOptions,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attends to one chunk of keys after the other; returns f32, shaped like `q`."""
    block, num_kv_heads, group, head_dim = q.shape
    chunk, window = pages_per_chunk * pages.keys.shape[-1], options.sliding_window
    rows = q.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * block, head_dim)

    def attend_chunk(j: jax.Array, carry: _Carry) -> _Carry:
        page = pages_of(j)
        k = pages.keys[page].transpose(1, 2, 0, 3).reshape(num_kv_heads, head_dim, chunk)
        v = pages.values[page].transpose(1, 0, 2, 3).reshape(num_kv_heads, chunk, head_dim)
        v = dequantized(v, rows.dtype)
        key = j * chunk + jnp.arange(chunk)
        scores = jnp.einsum("hqd,hdk->hqk", rows, k.astype(rows.dtype), preferred_element_type=jnp.float32)
        if pages.key_scales is not None:
            scores *= pages.key_scales[page].transpose(1, 0, 2).reshape(num_kv_heads, 1, chunk)
        visible = key[None] <= position[:, None]
        if window is not None:
            visible &= key[None] > position[:, None] - window
        scores, visible = _capped(scores, options.soft_cap), jnp.tile(visible, (group, 1))[None]
        weights, correction, new_top, new_total = _soften(scores, visible, *carry[:2])
        if pages.value_scales is not None:
            weights *= pages.value_scales[page].transpose(1, 0, 2).reshape(num_kv_heads, 1, chunk)
        update = jnp.einsum("hqk,hkd->hqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, new_total, carry[2] * correction + update

    first = 0 if window is None else jnp.maximum(position[0] - window + 1, 0) // chunk
    empty = _empty_softmax(rows.shape, None if sinks is None else jnp.repeat(sinks, block, axis=1))
    _, total, gathered = jax.lax.fori_loop(first, last // chunk + 1, attend_chunk, empty)
    attended: jax.Array = gathered / jnp.maximum(total, 1e-30)
    return attended.reshape(num_kv_heads, group, block, head_dim).transpose(2, 0, 1, 3)


def _empty_softmax(shape: tuple[int, ...], sinks: jax.Array | None) -> _Carry:
    """Returns the running maximum, sum and weighted values of rows `[..., head_dim]` that have seen no key yet.

    A sink, f32 by row or by some of the last axes of rows, is the first score that a row sees.
    """
    rows = (*shape[:-1], 1)
    top = jnp.full(rows, _MASKED, jnp.float32) if sinks is None else jnp.broadcast_to(sinks[..., None], rows)
    return top, jnp.full(rows, 0.0 if sinks is None else 1.0, jnp.float32), jnp.zeros(shape, jnp.float32)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _soften(
    scores: jax.Array, visible: jax.Array, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes one step of online softmax over the last axis: weights, correction of what came before, new maximum, new
    sum.
    """
    scores = jnp.where(visible, scores, _MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_top), 0.0)
    correction = jnp.exp(top - new_top)
    return weights, correction, new_top, total * correction + jnp.sum(weights, axis=-1, keepdims=True)
