"""The kernel behind the contract: what XLA prepares for it, and what it makes of the results."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, first_key
from penstock.engine.attention.fused.kernel import attend_kernel, scratch
from penstock.engine.attention.fused.layout import LANES, Blocks, HeadLayout, blocks_for, pages_per_block, tile_rows
from penstock.engine.attention.fused.softmax import Scores
from penstock.engine.attention.quantization import is_quantized, quantized
from penstock.engine.errors import ConfigError
from penstock.engine.models.attend import QKV, AttentionOptions, RaggedBatch, StackedCache

_VMEM_BYTES = 56 * 2**20  # of 64 MiB on TPU7x and 128 MiB before it
_NO_WINDOW = 2**30


class FusedAttention(AttentionBackend):
    """Pages are `[num_kv_heads, page_size, width]`, K and V of a token side by side on the lanes (`HeadLayout`).

    Any head_dim and any number of KV heads. With an 8-bit `kv_dtype`, keys and values are stored divided by `k_scale`
    and `v_scale`, rounded and cut to the type's range.
    """

    name = "fused"
    is_stacked = True

    def __init__(
        self,
        *,
        kv_dtype: str | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        max_keys: int = 1024,  # of a block of pages, at most
        max_queries: int = 128,  # of a block of prefill, at most; a power of two from 16
        interpret: Any = False,  # as of pallas_call
    ) -> None:
        self._max_keys = max_keys
        self._max_queries = max_queries
        self._kv_dtype = kv_dtype  # None: the model's own
        self._k_scale = k_scale
        self._v_scale = v_scale
        self._interpret = interpret

    def cache_dtype(self, dtype: str) -> str:
        return self._kv_dtype or dtype

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        width = HeadLayout(spec.head_dim).width
        pages = pages_per_block(
            num_kv_heads=spec.num_kv_heads,
            page_size=spec.page_size,
            pages_per_seq=pages_per_seq,
            kv_dtype=spec.dtype,
            width=width,
            max_keys=self._max_keys,
        )
        block = pages * spec.page_size  # a window begins with a whole one
        first = first_key(context, window) // block * block
        return -(-context // spec.page_size) * spec.page_size - first, tile_rows(spec.dtype)

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[CacheArray]:
        if spec.page_size % tile_rows(spec.dtype):
            raise ConfigError(
                f"page_size {spec.page_size} is no multiple of {tile_rows(spec.dtype)}, the rows of a TPU tile of "
                f"{spec.dtype}"
            )
        width = HeadLayout(spec.head_dim).width
        shape = (spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, width)
        return (CacheArray(shape, spec.dtype, (None, "kv_heads", None, None)),)

    def __call__(
        self,
        qkv: QKV,
        cache: StackedCache,
        batch: RaggedBatch,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, StackedCache]:
        q, k, v = qkv
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, page_size, width = cache.pages.shape[1:]
        layout, group = HeadLayout(head_dim), num_heads // num_kv_heads
        blocks = blocks_for(
            num_tokens=num_tokens,
            group=group,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            pages_per_seq=batch.page_indices.shape[1],
            kv_dtype=cache.pages.dtype.name,
            width=width,
            max_keys=self._max_keys,
            max_queries=self._max_queries,
        )
        starts = jnp.minimum(batch.cu_q_lens[:-1], num_tokens - 1)
        decoding = _is_real(batch) & (jnp.diff(batch.cu_q_lens) == 1)
        new = self._stored(k, v, layout, cache.pages.dtype)
        grouped = _grouped(q, layout, num_kv_heads)
        scores = Scores(options.scale_for(head_dim) * self._k_scale, options.soft_cap, self._v_scale)
        sink_rows = [] if sinks is None else [_sink_rows(sinks, num_kv_heads, blocks)]
        attend = self._kernel(q, new, cache.pages, batch.page_indices.shape, layout, blocks, scores, len(sink_rows))
        out_decode, out_prefill, pages = attend(
            *_tables(batch, starts, page_size, cache.first_page, options.sliding_window),
            jnp.pad(grouped[starts], ((0, 0), (0, 0), (0, blocks.decode_rows - group), (0, 0))),
            new[starts].astype(jnp.float32),
            _blocked(grouped, blocks.num_queries),
            _blocked(new[:, :, None], blocks.num_queries),
            pltpu.with_memory_space_constraint(cache.pages, pltpu.HBM),  # or XLA copies a small cache into VMEM
            *sink_rows,
        )
        seq = jnp.searchsorted(batch.cu_q_lens, jnp.arange(num_tokens), side="right") - 1
        seq = jnp.clip(seq, 0, decoding.shape[0] - 1)
        attended = _unblocked(out_prefill, num_tokens, group)
        attended = jnp.where(decoding[seq][:, None, None, None], out_decode[seq, :, :group], attended)
        attended = attended[..., layout.result_start : layout.result_start + head_dim]
        return attended.reshape(q.shape), StackedCache(pages, cache.first_page)

    def _kernel(
        self,
        q: jax.Array,
        new: jax.Array,
        pages: jax.Array,
        table: tuple[int, ...],  # sequences, pages of each
        layout: HeadLayout,
        blocks: Blocks,
        scores: Scores,
        num_sinks: int,  # arrays of them: one or none
    ) -> Any:
        num_tokens, num_heads, _ = q.shape
        num_kv_heads = pages.shape[1]
        group, num_blocks = num_heads // num_kv_heads, -(-num_tokens // blocks.num_queries)
        body = partial(
            attend_kernel,
            blocks=blocks,
            layout=layout,
            scores=scores,
            group=group,
            pages_per_seq=table[1],
        )
        vmem, hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
        decode = (table[0], num_kv_heads, blocks.decode_rows, layout.query_width)
        prefill = (num_blocks, num_kv_heads, blocks.num_queries * group, layout.query_width)
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=6,
                grid=(1,),
                in_specs=[vmem, vmem, hbm, hbm, hbm, *[vmem] * num_sinks],
                out_specs=[vmem, hbm, hbm],
                scratch_shapes=scratch(
                    blocks, layout, num_kv_heads, group, q.dtype.name, new.dtype.name, pages.dtype.name
                ),
            ),
            out_shape=[
                _shape(decode, q.dtype),
                _shape(prefill, q.dtype),
                pltpu.HBM(pages.shape, pages.dtype),
            ],
            input_output_aliases={10: 2},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
            interpret=self._interpret,
            name="fused_ragged_paged_attention",
        )

    def _stored(self, k: jax.Array, v: jax.Array, layout: HeadLayout, dtype: jnp.dtype) -> jax.Array:
        """Keys and values as they will lie in a page, [num_tokens, num_kv_heads, width], not yet of the page's type."""
        v = jnp.nan_to_num(v)  # a NaN would outlast a weight of 0, and its sequence
        if is_quantized(dtype):  # in values that the type has exactly
            scaled = ((k, self._k_scale), (v, self._v_scale))
            k, v = (quantized(x, dtype, scale).astype(jnp.float32) for x, scale in scaled)
        padding = ((0, 0), (0, 0), (0, layout.half - k.shape[2]))
        both = jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=2)
        return both.astype(jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)


def _shape(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _is_real(batch: RaggedBatch) -> jax.Array:
    return jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]


def _tables(
    batch: RaggedBatch, starts: jax.Array, page_size: int, first_page: jax.Array, sliding_window: int | None
) -> tuple[jax.Array, ...]:
    """What the kernel's `Tables` hold; `starts` are the sequences' first tokens."""
    # The kernel writes where a sequence's pages say, and the pages of one that is over are others'.
    is_over = batch.slots[starts] < page_size
    page_indices = jnp.where(is_over[:, None], 0, batch.page_indices)
    q_lens, is_real = jnp.diff(batch.cu_q_lens), _is_real(batch)
    decoding, prefilling = is_real & (q_lens == 1), is_real & (q_lens > 1)
    info = [jnp.sum(decoding), jnp.sum(prefilling), first_page, sliding_window or _NO_WINDOW]
    return (
        batch.kv_lens,
        batch.cu_q_lens,
        page_indices.reshape(-1),
        _first_those(decoding),
        _first_those(prefilling),
        jnp.stack([jnp.asarray(word, jnp.int32) for word in info]),
    )


def _first_those(is_meant: jax.Array) -> jax.Array:
    """The numbers of the sequences that are meant, in order, before the others'."""
    return jnp.argsort(~is_meant, stable=True).astype(jnp.int32)


def _sink_rows(sinks: jax.Array, num_kv_heads: int, blocks: Blocks) -> jax.Array:
    """f32 [num_kv_heads, decode rows, LANES], the same in all lanes."""
    rows = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    rows = jnp.pad(rows, ((0, 0), (0, blocks.decode_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def _grouped(q: jax.Array, layout: HeadLayout, num_kv_heads: int) -> jax.Array:
    """[num_tokens, num_kv_heads, group, query width], zero where V lies."""
    num_tokens, num_heads, head_dim = q.shape
    q = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, layout.query_width - head_dim)))


def _blocked(x: jax.Array, num_queries: int) -> jax.Array:
    """[num_tokens, num_kv_heads, rows, lanes] -> [blocks, num_kv_heads, queries * rows, lanes]."""
    num_tokens, num_heads, rows, lanes = x.shape
    x = jnp.pad(x, ((0, -num_tokens % num_queries), (0, 0), (0, 0), (0, 0)))
    x = x.reshape(-1, num_queries, num_heads, rows, lanes).transpose(0, 2, 1, 3, 4)
    return x.reshape(-1, num_heads, num_queries * rows, lanes)


def _unblocked(x: jax.Array, num_tokens: int, group: int) -> jax.Array:
    """The other way: [num_tokens, num_kv_heads, group, lanes]."""
    num_blocks, num_heads, rows, lanes = x.shape
    x = x.reshape(num_blocks, num_heads, rows // group, group, lanes).transpose(0, 2, 1, 3, 4)
    return x.reshape(-1, num_heads, group, lanes)[:num_tokens]
