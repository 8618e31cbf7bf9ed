"""Any attention implementation on the devices of a mesh: each computes its own heads, without communication."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec, Prepared
from penstock.engine.models.attention_interface import (
    QKV,
    AttentionOptions,
    KVScales,
    LayerCache,
    RaggedBatch,
    StackedCache,
)
from penstock.engine.sharding.placement import Placement

_WHOLE: Any = PartitionSpec()
_ANY_PAGE_SIZE = 128  # a size that every implementation takes


class ShardedAttention(AttentionBackend):
    """Runs `inner` on every device of `placement`, with the heads and the cache split over a replica."""

    def __init__(self, inner: AttentionBackend, placement: Placement) -> None:
        self.name = inner.name
        self.is_stacked = inner.is_stacked
        self.quantized_dtypes = inner.quantized_dtypes
        self._inner = inner
        self._placement = placement

    def cache_dtype(self, dtype: str) -> str:
        return self._inner.cache_dtype(dtype)

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        return self._inner.rows_moved(context, self._local(spec), pages_per_seq, window)

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[Any, ...]:
        arrays = self._inner.cache_arrays(self._local(spec))
        whole: tuple[Any, ...] = jax.tree.map(partial(_whole_array, shares=self._placement.num_shares), arrays)
        return whole

    def _local(self, spec: KVCacheSpec) -> KVCacheSpec:
        """Returns one device's share."""
        return replace(spec, num_kv_heads=spec.num_kv_heads // self._placement.num_shares)

    def init_cache(self, spec: KVCacheSpec) -> tuple[LayerCache, ...]:
        arrays = self.cache_arrays(spec)
        shardings = jax.tree.map(lambda array: self._placement.sharding(array.axes), arrays)
        cache: tuple[LayerCache, ...] = jax.jit(partial(super().init_cache, spec), out_shardings=shardings)()
        return cache

    def abstract_cache(self, spec: KVCacheSpec) -> tuple[LayerCache, ...]:
        """Returns the shapes of a cache, each with its sharding: for compiling without memory."""

        def shape(array: CacheArray) -> jax.ShapeDtypeStruct:
            sharding = self._placement.sharding(array.axes)
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        cache: tuple[LayerCache, ...] = jax.tree.map(shape, self.cache_arrays(spec))
        return cache

    def prepare(self, batch: RaggedBatch, page_size: int) -> Prepared:
        return self._inner.prepare(batch, page_size)

    def __call__(
        self,
        qkv: QKV,
        cache: LayerCache,
        prepared: Prepared,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        split: Any = [self._placement.spec((None, name, None)) for name in ("heads", "kv_heads", "kv_heads")]
        held = self._cache_specs(cache)

        by_head = [self._placement.spec((name,)) for name in ("per_head", "kv_heads")]

        in_qkv: Any = QKV(*split) if qkv.k is not None else QKV(split[0], None, None)

        def attend(
            qkv: QKV, cache: LayerCache, prepared: Prepared, sinks: jax.Array | None, kv_scales: KVScales | None
        ) -> Any:
            return self._inner(qkv, cache, prepared, options=options, sinks=sinks, kv_scales=kv_scales)

        run = jax.shard_map(
            attend,
            mesh=self._placement.mesh,
            in_specs=(in_qkv, held, _WHOLE, *by_head),
            out_specs=(split[0], held),
            check_vma=False,
        )
        attended, written = run(qkv, cache, prepared, sinks, kv_scales)
        return attended, written

    def _cache_specs(self, cache: LayerCache) -> Any:
        """Returns the partition specs of a layer's arrays: the same in all layers, and in caches of all sizes."""
        dtype = jax.tree.leaves(cache)[0].dtype.name
        arrays = self._inner.cache_arrays(KVCacheSpec(1, 1, _ANY_PAGE_SIZE, 1, 8, dtype))[0]
        specs: Any = jax.tree.map(lambda array: self._placement.spec(array.axes), arrays)
        return StackedCache(specs, _WHOLE) if isinstance(cache, StackedCache) else specs


def _whole_array(array: CacheArray, shares: int) -> CacheArray:
    """Returns the array of all devices together, from one device's share."""
    shape = tuple(
        size * shares if axis == "kv_heads" else size for size, axis in zip(array.shape, array.axes, strict=True)
    )
    return replace(array, shape=shape)
