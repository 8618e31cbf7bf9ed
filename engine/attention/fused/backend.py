"""The kernel behind the contract: what XLA prepares for it, and what it makes of the results."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, first_key
from penstock.engine.attention.fused.kernel import NUM_TABLES, attend_kernel, scratch
from penstock.engine.attention.fused.layout import LANES, Blocks, HeadLayout, blocks_for, tile_rows
from penstock.engine.attention.fused.prepared import StepTables, step_tables
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
        del pages_per_seq  # whole tiles, however pages are put together into blocks
        tile = tile_rows(spec.dtype)
        return -(-context // tile) * tile - first_key(context, window) // tile * tile, tile

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[CacheArray]:
        if spec.page_size % tile_rows(spec.dtype):
            raise ConfigError(
                f"page_size {spec.page_size} is no multiple of {tile_rows(spec.dtype)}, the rows of a TPU tile of "
                f"{spec.dtype}"
            )
        width = HeadLayout(spec.head_dim).width
        shape = (spec.num_layers * spec.num_pages, spec.num_kv_heads, spec.page_size, width)
        return (CacheArray(shape, spec.dtype, (None, "kv_heads", None, None)),)

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
    ) -> tuple[jax.Array, StackedCache]:
        """The number of tokens is a multiple of 16, as those of all buckets are."""
        q, k, v = qkv
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, page_size, width = cache.pages.shape[1:]
        layout, group = HeadLayout(head_dim), num_heads // num_kv_heads
        blocks = blocks_for(
            num_tokens=num_tokens,
            group=group,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            pages_per_seq=prepared.pages_per_seq,
            kv_dtype=cache.pages.dtype.name,
            width=width,
            max_keys=self._max_keys,
            max_queries=self._max_queries,
        )
        new = self._stored(k, v, layout, cache.pages.dtype)
        scores = Scores(options.scale_for(head_dim) * self._k_scale, options.soft_cap, self._v_scale)
        sink_rows = [] if sinks is None else [_sink_rows(sinks, num_kv_heads, blocks)]
        operands = [
            _rows(q, layout.query_width),
            *new,
            pltpu.with_memory_space_constraint(cache.pages, pltpu.HBM),  # or XLA copies a small cache into VMEM
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
        )
        vmem, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
        attended, pages = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=NUM_TABLES,
                grid=(1,),
                in_specs=[*[anywhere] * (len(new) + 2), *[vmem] * len(sink_rows)],
                out_specs=[anywhere, anywhere],
                scratch_shapes=scratch(
                    blocks, layout, num_kv_heads, group, q.dtype.name, new[0].dtype.name, cache.pages.dtype.name
                ),
            ),
            out_shape=[
                jax.ShapeDtypeStruct(operands[0].shape, q.dtype),  # type: ignore[no-untyped-call]
                pltpu.HBM(cache.pages.shape, cache.pages.dtype),
            ],
            input_output_aliases={NUM_TABLES + len(new) + 1: 1},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
            cost_estimate=_cost(q, cache.pages, prepared),
            interpret=self._interpret,
            name="fused_ragged_paged_attention",
        )(*tables, *operands)
        if layout.query_width != head_dim:
            attended = attended.reshape(num_tokens, num_heads, -1)
            attended = attended[..., layout.result_start : layout.result_start + head_dim]
        return attended.reshape(q.shape), StackedCache(pages, cache.first_page)

    def _stored(self, k: jax.Array, v: jax.Array, layout: HeadLayout, dtype: jnp.dtype) -> list[jax.Array]:
        """Keys and values as they will lie in a page, in parts of whole lanes for each KV head, each
        `[num_tokens, num_kv_heads * lanes]`, not yet of the page's type.
        """
        if layout.is_packed:
            k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, layout.half - x.shape[2]))) for x in (k, v))
        else:  # from here on as matmuls write them
            k, v = _rows(k, layout.half), _rows(v, layout.half)
        v = jnp.nan_to_num(v)  # a NaN would outlast a weight of 0, and its sequence
        if is_quantized(dtype):  # in values that the type has exactly
            scaled = ((k, self._k_scale), (v, self._v_scale))
            k, v = (quantized(x, dtype, scale).astype(jnp.float32) for x, scale in scaled)
        k, v = (x.astype(jnp.float32 if dtype == jnp.float32 else jnp.bfloat16) for x in (k, v))
        return [_rows(jnp.concatenate([k, v], axis=2), layout.width)] if layout.is_packed else [k, v]


def _rows(x: jax.Array, lanes: int) -> jax.Array:
    """[num_tokens, heads, features] -> [num_tokens, heads * lanes], zero behind each head's features."""
    if x.shape[2] != lanes:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[2])))
    return x.reshape(x.shape[0], -1)


def _cost(q: jax.Array, pages: jax.Array, tables: StepTables) -> pl.CostEstimate:
    """For XLA's schedule. Shapes do not say how long sequences are: as many as there can be decode, each behind half of
    what its table has pages for.
    """
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, page_size, width = pages.shape[1:]
    context = tables.pages_per_seq * page_size // 2
    key_bytes = num_kv_heads * width * pages.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * num_tokens * num_heads * context * width,
        bytes_accessed=min(num_tokens, tables.max_seqs) * context * key_bytes + 2 * q.size * q.dtype.itemsize,
        transcendentals=num_tokens * num_heads * context,
    )


def _sink_rows(sinks: jax.Array, num_kv_heads: int, blocks: Blocks) -> jax.Array:
    """f32 [num_kv_heads, decode rows, LANES], the same in all lanes."""
    rows = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    rows = jnp.pad(rows, ((0, 0), (0, blocks.decode_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
