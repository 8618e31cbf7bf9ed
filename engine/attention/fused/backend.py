"""The fused kernel as an attention backend: what XLA prepares for it, and what becomes of the results."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, first_key
from penstock.engine.attention.fused.kernel import NUM_TABLES, attend_kernel, scratch
from penstock.engine.attention.fused.layout import LANES, BlockSizes, HeadLayout, blocks_for, tile_rows
from penstock.engine.attention.fused.prepared import StepTables, step_tables
from penstock.engine.attention.fused.scales import scale_rows
from penstock.engine.attention.fused.softmax import ScoreFunction
from penstock.engine.attention.quantization import QUANTIZED_DTYPES, is_quantized, quantized_kv
from penstock.engine.errors import ConfigError
from penstock.engine.models.attend import QKV, AttentionOptions, KVScales, RaggedBatch, StackedCache

_VMEM_BYTES = 56 * 2**20  # of 64 MiB on TPU7x and 128 MiB before it
_NO_WINDOW = 2**30
_SCALE_BYTES = 4


class FusedAttention(AttentionBackend):
    """Attention by the fused TPU kernel, for any head_dim and any number of KV heads.

    Pages are `[num_kv_heads, page_size, width]`, with K and V of a token side by side on the lanes (`HeadLayout`).
    8-bit codes have a second array with the tokens' scales: f32 `[num_kv_heads, 2 (of keys, of values), page_size]` for
    each page.
    """

    name = "fused"
    is_stacked = True
    quantized_dtypes = QUANTIZED_DTYPES

    def __init__(
        self,
        *,
        kv_dtype: str | None = None,
        max_keys: int = 1024,  # in a block of pages, at most
        max_queries: int = 128,  # in a block of prefill, at most; a power of two, at least 16
        interpret: Any = False,  # as for pallas_call
    ) -> None:
        self._max_keys = max_keys
        self._max_queries = max_queries
        self._kv_dtype = kv_dtype  # None: the model's own
        self._interpret = interpret

    def cache_dtype(self, dtype: str) -> str:
        return self._kv_dtype or dtype

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        del pages_per_seq  # whole tiles move, whatever the blocks of pages
        tile, first = tile_rows(spec.dtype), first_key(context, window)
        read = _in_tiles(first, context, tile)
        if not is_quantized(spec.dtype):
            return read, tile
        # Scales move for LANES tokens at a time: convert the excess over the rows' tokens to rows.
        row = HeadLayout(spec.head_dim).width + 2 * _SCALE_BYTES
        extra = (_in_tiles(first, context, LANES) - read, LANES - tile)
        more_read, more_written = (-(-tokens * 2 * _SCALE_BYTES // row) for tokens in extra)
        return read + more_read, tile + more_written

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[CacheArray | tuple[CacheArray, CacheArray]]:
        tile, what = tile_rows(spec.dtype), f"rows of a TPU tile of {spec.dtype}"
        if is_quantized(spec.dtype):
            tile, what = LANES, f"lanes of a TPU tile, on which scales of {spec.dtype} lie"
        if spec.page_size % tile:
            raise ConfigError(f"page_size {spec.page_size} is no multiple of {tile}, the {what}")
        axes = (None, "kv_heads", None, None)
        pages, heads = spec.num_layers * spec.num_pages, spec.num_kv_heads
        codes = CacheArray((pages, heads, spec.page_size, HeadLayout(spec.head_dim).width), spec.dtype, axes)
        if not is_quantized(spec.dtype):
            return (codes,)
        return ((codes, CacheArray((pages, heads, 2, spec.page_size), "float32", axes)),)

    def prepare(self, batch: RaggedBatch, page_size: int) -> StepTables:
        return step_tables(batch, page_size)

    def __call__(
        self,
        qkv: QKV,
        cache: StackedCache,
        prepared: StepTables,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, StackedCache]:
        """Attends by one kernel call. The number of tokens must be a multiple of 16, as in all buckets."""
        q, k, v = qkv
        num_tokens, num_heads, head_dim = q.shape
        held = jax.tree.leaves(cache.pages)
        pages, has_scales = held[0], len(held) > 1
        num_kv_heads, page_size, width = pages.shape[1:]
        layout, group = HeadLayout(head_dim), num_heads // num_kv_heads
        blocks = blocks_for(
            num_tokens=num_tokens,
            group=group,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            pages_per_seq=prepared.pages_per_seq,
            kv_dtype=pages.dtype.name,
            width=width,
            max_keys=self._max_keys,
            max_queries=self._max_queries,
        )
        new, new_scales = [], []
        if k is not None and v is not None:
            if has_scales:
                k, v, rows = _coded(k, v, pages.dtype, kv_scales)
                new_scales.append(rows)
            new = _stored(k, v, layout, pages.dtype)
        scores = ScoreFunction(options.scale_for(head_dim), options.soft_cap)
        sink_rows = [] if sinks is None else [_sink_rows(sinks, num_kv_heads, blocks)]
        operands = [
            _rows(q, layout.query_width),
            *new,
            *new_scales,
            *(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in held),  # else XLA copies small ones
            *sink_rows,
        ]
        tables = (*jax.tree.leaves(prepared), cache.first_page.reshape(1))
        body = partial(
            attend_kernel,
            blocks=blocks,
            layout=layout,
            scores=scores,
            group=group,
            pages_per_seq=prepared.pages_per_seq,
            window=options.sliding_window or _NO_WINDOW,
            num_parts=len(new),
            has_scales=has_scales,
        )
        vmem, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
        first_held = len(operands) - len(sink_rows) - len(held)
        attended, *written = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=NUM_TABLES,
                grid=(1,),
                in_specs=[*[anywhere] * (first_held + len(held)), *[vmem] * len(sink_rows)],
                out_specs=[anywhere] * (1 + len(held)),
                scratch_shapes=scratch(
                    blocks, layout, num_kv_heads, group, q.dtype.name, _new_dtype(pages.dtype), pages.dtype.name
                ),
            ),
            out_shape=[
                jax.ShapeDtypeStruct(operands[0].shape, q.dtype),  # type: ignore[no-untyped-call]
                *(pltpu.HBM(array.shape, array.dtype) for array in held),
            ],
            input_output_aliases={NUM_TABLES + first_held + i: 1 + i for i in range(len(held))},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
            cost_estimate=_cost(q, held, prepared),
            interpret=self._interpret,
            name="fused_ragged_paged_attention",
        )(*tables, *operands)
        if layout.query_width != head_dim:
            attended = attended.reshape(num_tokens, num_heads, -1)
            attended = attended[..., layout.result_start : layout.result_start + head_dim]
        new_cache = jax.tree.unflatten(jax.tree.structure(cache.pages), written)
        return attended.reshape(q.shape), StackedCache(new_cache, cache.first_page)


def _stored(k: jax.Array, v: jax.Array, layout: HeadLayout, dtype: jnp.dtype) -> list[jax.Array]:
    """Returns keys and values as a page will hold them, in parts of whole lanes for each KV head, each `[num_tokens,
    num_kv_heads * lanes]`.

    They do not have the page's type yet, but only values that it can represent.
    """
    if layout.is_packed:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, layout.half - x.shape[2]))) for x in (k, v))
    else:  # from here on in the layout that matmuls write
        k, v = _rows(k, layout.half), _rows(v, layout.half)
    v = jnp.nan_to_num(v)  # a NaN would survive a weight of 0, and its sequence
    k, v = (x.astype(_new_dtype(dtype)) for x in (k, v))
    return [_rows(jnp.concatenate([k, v], axis=2), layout.width)] if layout.is_packed else [k, v]


def _new_dtype(dtype: jnp.dtype) -> str:
    """Returns the type in which the kernel takes new keys and values, for pages of `dtype`."""
    return "float32" if dtype == jnp.float32 else "bfloat16"


def _coded(
    k: jax.Array, v: jax.Array, dtype: jnp.dtype, kv_scales: KVScales | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values as codes, in a type that represents them exactly, and their `scale_rows`."""
    (key_codes, key_scales), (value_codes, value_scales) = quantized_kv(k, v, dtype, kv_scales)
    return key_codes.astype(jnp.bfloat16), value_codes.astype(jnp.bfloat16), scale_rows(key_scales, value_scales)


def _in_tiles(first: int, end: int, tile: int) -> int:
    """Returns the number of rows in the tiles that hold `[first, end)`."""
    return -(-end // tile) * tile - first // tile * tile


def _rows(x: jax.Array, lanes: int) -> jax.Array:
    """Pads and flattens [num_tokens, heads, features] to [num_tokens, heads * lanes], with zeros after each head's
    features.
    """
    if x.shape[2] != lanes:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[2])))
    return x.reshape(x.shape[0], -1)


def _cost(q: jax.Array, held: list[jax.Array], tables: StepTables) -> pl.CostEstimate:
    """Estimates the cost for XLA's scheduler. Shapes do not tell the lengths of sequences: the estimate has as many
    decoding sequences as possible, each at half of its table's capacity.
    """
    num_tokens, num_heads, _ = q.shape
    page_size, width = held[0].shape[2:]
    context = tables.pages_per_seq * page_size // 2
    key_bytes = sum(array.nbytes // (array.shape[0] * page_size) for array in held)
    return pl.CostEstimate(
        flops=2 * num_tokens * num_heads * context * width,
        bytes_accessed=min(num_tokens, tables.max_seqs) * context * key_bytes + 2 * q.size * q.dtype.itemsize,
        transcendentals=num_tokens * num_heads * context,
    )


def _sink_rows(sinks: jax.Array, num_kv_heads: int, blocks: BlockSizes) -> jax.Array:
    """Returns sinks as f32 [num_kv_heads, decode rows, LANES], the same in all lanes."""
    rows = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    rows = jnp.pad(rows, ((0, 0), (0, blocks.decode_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
