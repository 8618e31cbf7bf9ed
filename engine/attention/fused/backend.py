"""The fused kernel as an attention backend: what XLA prepares for it, and what becomes of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, first_key
from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.kernel import NUM_TABLES, Scratch, attend_kernel, scratch
from penstock.engine.attention.fused.layout import LANES, BlockSizes, HeadLayout, HeadTiles, blocks_for, tile_rows
from penstock.engine.attention.fused.prepared import StepTables, step_tables
from penstock.engine.attention.fused.scales import scale_rows
from penstock.engine.attention.fused.softmax import ScoreFunction
from penstock.engine.attention.quantization import QUANTIZED_DTYPES, is_quantized, quantized_kv
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, RaggedBatch, StackedCache

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
        max_blocks: int = 4,  # of keys, at most, that decode attends to at once
        max_queries: int = 128,  # in a block of prefill, at most; a power of two, at least 16
        device_kind: str | None = None,  # as JAX names it; None: not TPU7x
        interpret: Any = False,  # as for pallas_call
    ) -> None:
        self._max_keys = max_keys
        self._max_blocks = max_blocks
        self._max_queries = max_queries
        self._kv_dtype = kv_dtype  # None: the model's own
        self._device_kind = device_kind
        self._interpret = interpret

    def cache_dtype(self, dtype: str) -> str:
        return self._kv_dtype or dtype

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        del pages_per_seq  # whole tiles move, whatever the blocks of pages
        tile, first = tile_rows(spec.dtype), first_key(context, window)
        read = num_tile_rows(first, context, tile)
        if not is_quantized(spec.dtype):
            return read, tile
        # Scales move for LANES tokens at a time: convert the excess over the rows' tokens to rows.
        row = HeadLayout(spec.head_dim).width + 2 * _SCALE_BYTES
        extra = (num_tile_rows(first, context, LANES) - read, LANES - tile)
        more_read, more_written = (-(-tokens * 2 * _SCALE_BYTES // row) for tokens in extra)
        return read + more_read, tile + more_written

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[CacheArray | tuple[CacheArray, CacheArray]]:
        tile, what = tile_rows(spec.dtype), f"rows of a TPU tile of {spec.dtype}"
        if is_quantized(spec.dtype):
            tile, what = LANES, f"lanes of a TPU tile, on which scales of {spec.dtype} lie"
        if spec.page_size % tile:
            raise ConfigError(f"page_size {spec.page_size} is not a multiple of {tile}, the {what}")
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
        held = jax.tree.leaves(cache.pages)
        layout, blocks = HeadLayout(q.shape[2]), self._blocks(q, held[0], prepared)
        elements = PageElements.on_chip(held[0].dtype.name, self._device_kind)
        rows, scales = ([], []) if k is None or v is None else _new_rows(k, v, layout, elements, kv_scales)
        body = partial(
            attend_kernel,
            blocks=blocks,
            layout=layout,
            scores=ScoreFunction(options.scale_for(q.shape[2]), options.soft_cap),
            group=blocks.decode_tiles.group,
            pages_per_seq=prepared.pages_per_seq,
            window=options.sliding_window,
            num_parts=len(rows),
            elements=elements,
        )
        attended, *written = self._run(
            body,
            (*jax.tree.leaves(prepared), cache.first_page.reshape(1)),
            [_rows(q, layout.query_width), *rows, *scales],
            held,
            [] if sinks is None else [_sink_rows(sinks, blocks.decode_tiles)],
            scratch(blocks, layout, q.dtype.name, elements),
            _cost(q, held, prepared),
        )
        if layout.query_width != q.shape[2]:
            attended = attended.reshape(*q.shape[:2], -1)
            attended = attended[..., layout.result_start : layout.result_start + q.shape[2]]
        new_cache = jax.tree.unflatten(jax.tree.structure(cache.pages), written)
        return attended.reshape(q.shape), StackedCache(new_cache, cache.first_page)

    def _blocks(self, q: jax.Array, pages: jax.Array, prepared: StepTables) -> BlockSizes:
        num_kv_heads, page_size, width = pages.shape[1:]
        return blocks_for(
            num_tokens=q.shape[0],
            group=q.shape[1] // num_kv_heads,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            pages_per_seq=prepared.pages_per_seq,
            kv_dtype=pages.dtype.name,
            is_scaled=is_quantized(pages.dtype.name),
            width=width,
            max_keys=self._max_keys,
            max_blocks=self._max_blocks,
            max_queries=self._max_queries,
        )

    def _run(
        self,
        body: Callable[..., None],
        tables: Sequence[jax.Array],
        queries: Sequence[jax.Array],
        held: Sequence[jax.Array],
        sink_rows: Sequence[jax.Array],
        scratch_shapes: Scratch,
        cost: pl.CostEstimate,
    ) -> Sequence[jax.Array]:
        """Calls the kernel. Returns what the first of `queries` attends to, then `held`, updated in place."""
        vmem, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
        called: Sequence[jax.Array] = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=NUM_TABLES,
                grid=(1,),
                in_specs=[*[anywhere] * (len(queries) + len(held)), *[vmem] * len(sink_rows)],
                out_specs=[anywhere] * (1 + len(held)),
                scratch_shapes=[scratch_shapes],
            ),
            out_shape=[
                jax.ShapeDtypeStruct(queries[0].shape, queries[0].dtype),
                *(pltpu.HBM(array.shape, array.dtype) for array in held),
            ],
            input_output_aliases={NUM_TABLES + len(queries) + i: 1 + i for i in range(len(held))},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
            cost_estimate=cost,
            interpret=self._interpret,
            name="fused_ragged_paged_attention",
        )(
            *tables,
            *queries,
            *(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in held),  # else XLA copies small ones
            *sink_rows,
        )
        return called


def _stored(k: jax.Array, v: jax.Array, layout: HeadLayout, elements: PageElements) -> list[jax.Array]:
    """Returns keys and values as a page will hold them, in parts of whole lanes for each KV head, each `[num_tokens,
    num_kv_heads * lanes]`. They do not have the page's type yet (`PageElements.passed`).
    """
    if layout.is_packed:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, layout.half - x.shape[2]))) for x in (k, v))
    else:  # from here on in the layout that matmuls write
        k, v = _rows(k, layout.half), _rows(v, layout.half)
    v = jnp.nan_to_num(v)  # a NaN would survive a weight of 0, and outlive its sequence
    k, v = (x.astype(elements.new_dtype) for x in (k, v))
    return [_rows(jnp.concatenate([k, v], axis=2), layout.width)] if layout.is_packed else [k, v]


def num_tile_rows(first: int, end: int, tile: int) -> int:
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
    """Estimates the cost for XLA's scheduler. Shapes do not tell how long sequences are: the estimate assumes as many
    decoding sequences as possible, each with half of the tokens that its table has room for.
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


def _new_rows(
    k: jax.Array, v: jax.Array, layout: HeadLayout, elements: PageElements, kv_scales: KVScales | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the rows that new keys and values take in pages, and their `scale_rows` where pages have scales."""
    if not is_quantized(elements.dtype):
        return _stored(k, v, layout, elements), []
    (k, key_scales), (v, value_scales) = quantized_kv(k, v, elements.dtype, kv_scales)
    parts = _stored(elements.passed(k), elements.passed(v), layout, elements)
    return parts, [scale_rows(key_scales, value_scales)]


def _sink_rows(sinks: jax.Array, tiles: HeadTiles) -> jax.Array:
    """Returns sinks as f32 [tiles, rows, LANES], the same in all lanes."""
    rows = sinks.astype(jnp.float32).reshape(tiles.num, -1)
    rows = jnp.pad(rows, ((0, 0), (0, tiles.rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
