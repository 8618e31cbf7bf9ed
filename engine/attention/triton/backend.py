"""The Triton kernels as an attention backend: what XLA prepares for them, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, first_key
from penstock.engine.attention.triton.decode import decode_kernel, join_kernel, split_work
from penstock.engine.attention.triton.pages import write_kernel
from penstock.engine.attention.triton.prefill import prefill_kernel, query_blocks
from penstock.engine.attention.triton.softmax import MaskedScores
from penstock.engine.attention.triton.tiles import NUM_PROGRAMS, STAGES, Heads, decode_tiles, prefill_tiles
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, LayerCache, RaggedBatch


class TritonAttention(AttentionBackend):
    """Attention by Triton kernels, for any head_dim, number of KV heads and page size.

    Keys and values of a layer are `[num_pages, num_kv_heads, page_size, head_dim]`, each an array of its own. A page
    should hold whole blocks of keys (`tiles.DecodeTiles`). There are four kernels: one writes the step's keys and
    values into the pages, two decode, one prefills. They read from the device which sequences have work for them; a
    program without work exits at once.
    """

    name = "triton"
    # In a loop over layers each layer's weights would be copied out of the stack before use. If unrolled, what depends
    # only on the batch is also the same expression in all layers, which XLA then computes once.
    is_stacked = False
    quantized_dtypes = ()

    def __init__(self, *, num_programs: int = NUM_PROGRAMS, interpret: bool = False) -> None:
        """Creates the backend.

        `num_programs` keep the GPU busy: if fewer sequences decode, their keys are split into as many parts. With
        `interpret` it runs on any device, slowly: for tests.
        """
        self._num_programs = num_programs
        self._interpret = interpret

    def cache_dtype(self, dtype: str) -> str:
        return dtype

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        del spec, pages_per_seq
        return context + 1 - first_key(context, window), 1  # what lies after the last token is masked, not read

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[tuple[CacheArray, CacheArray], ...]:
        shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        array = CacheArray(shape, spec.dtype, (None, "kv_heads", None, None))
        return ((array, array),) * spec.num_layers

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
        del kv_scales
        q, k, v = qkv
        keys, values = cache
        heads = Heads(q.shape[1], keys.shape[1], q.shape[2])
        scores = MaskedScores(options.scale_for(heads.head_dim), options.soft_cap, options.sliding_window)
        if k is not None and v is not None:
            keys, values = self._write(k, v, cache, batch, heads)
        sinks = None if sinks is None else sinks.astype(jnp.float32)
        attended = self._decode(q, keys, values, batch, heads, scores, sinks)
        return self._prefill(attended, q, keys, values, batch, heads, scores, sinks), (keys, values)

    def _write(
        self, k: jax.Array, v: jax.Array, cache: LayerCache, batch: RaggedBatch, heads: Heads
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the pages with this step's keys and values."""
        write = self._call(
            partial(write_kernel, heads=heads),
            "write_kv",
            grid=(k.shape[0],),
            out=cache,
            aliases={3: 0, 4: 1},
            num_stages=1,
        )
        keys, values = write(k, v, batch.slots, *cache)
        return keys, values

    def _decode(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        batch: RaggedBatch,
        heads: Heads,
        scores: MaskedScores,
        sinks: jax.Array | None,  # f32 [num_heads]
    ) -> jax.Array:
        """Returns attended values, shaped like `q`, in the rows of sequences with one query; other rows are
        undefined.
        """
        max_seqs, pages_per_seq = batch.page_indices.shape
        tiles = decode_tiles(heads, keys.dtype.name, self._num_programs, max_seqs, pages_per_seq * keys.shape[2])
        work, shares = split_work(batch, tiles, heads, scores.sliding_window)
        part = (tiles.num_shares, heads.num_heads)
        parts, weights = _shape((*part, heads.head_dim), jnp.float32), _shape(part, jnp.float32)
        attend = self._call(
            partial(decode_kernel, heads=heads, tiles=tiles, scores=scores),
            "decode",
            grid=(heads.num_kv_heads, tiles.num_shares),
            out=(q, parts, weights),
            num_warps=tiles.num_warps,
        )
        out, *found = attend(q, keys, values, batch.page_indices, batch.kv_lens, work, shares, sinks)
        if tiles.max_splits == 1:
            return out
        join = self._call(
            partial(join_kernel, heads=heads, tiles=tiles),
            "join",
            grid=(heads.num_heads, max_seqs),
            out=(q,),
            aliases={3: 0},
            num_stages=1,
        )
        (joined,) = join(*found, work, out)
        return joined

    def _prefill(
        self,
        attended: jax.Array,  # as q: overwritten in the rows of sequences with more than one query
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        batch: RaggedBatch,
        heads: Heads,
        scores: MaskedScores,
        sinks: jax.Array | None,
    ) -> jax.Array:
        tiles = prefill_tiles(heads, keys.dtype.name, q.shape[0], batch.kv_lens.shape[0])
        attend = self._call(
            partial(prefill_kernel, heads=heads, tiles=tiles, scores=scores),
            "prefill",
            grid=(heads.num_kv_heads, tiles.num_blocks),
            out=(q,),
            aliases={7: 0},
            num_warps=tiles.num_warps,
        )
        blocks = query_blocks(batch, tiles)
        tables = batch.page_indices, batch.kv_lens, batch.cu_q_lens, blocks
        (filled,) = attend(q, keys, values, *tables, attended, sinks)
        return filled

    def _call(
        self,
        kernel: Callable[..., None],
        name: str,
        *,
        grid: tuple[int, ...],
        out: tuple[Any, ...],  # arrays with the shapes of the results
        aliases: dict[int, int] | None = None,
        num_warps: int = 4,
        num_stages: int = STAGES,
    ) -> Callable[..., list[jax.Array]]:
        """Returns the call of `kernel` over `grid`; its references are whole arrays in device memory."""
        run: Callable[..., list[jax.Array]] = pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=[_shape(array.shape, array.dtype) for array in out],
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=self._interpret,
            name=f"ragged_paged_attention_{name}",
        )
        return run


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
