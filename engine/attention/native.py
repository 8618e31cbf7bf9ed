"""Ragged paged attention for CPUs in C++; the kernel is `engine/native/attention.cc`."""

from __future__ import annotations

import jax
import numpy as np

from penstock.engine.attention.contract import AttentionBackend, CacheArray, KVCacheSpec, RaggedBatch, turned_keys
from penstock.engine.errors import ConfigError
from penstock.engine.models.decoder import LayerCache
from penstock.engine.native import ATTENTION


class NativeAttention(AttentionBackend):
    """Keys are `[pages, num_kv_heads, head_dim, page_size]`, values `[pages, num_kv_heads, page_size, head_dim]`,
    of the model's own type: f32 or bf16. The library that has the kernel must be loaded.
    """

    name = "native"
    is_stacked = False

    def cache_dtype(self, dtype: str) -> str:
        return dtype

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[tuple[CacheArray, CacheArray], ...]:
        return turned_keys(spec)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        batch: RaggedBatch,
        *,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        if soft_cap is not None:
            raise ConfigError(f"attention 'native' has no soft cap, and the model's is {soft_cap}; set xla")
        keys, values = cache
        out_types = [jax.typeof(array) for array in (q, keys, values)]
        call = jax.ffi.ffi_call(ATTENTION, out_types, input_output_aliases={3: 1, 4: 2})
        out, keys, values = call(
            q, k, v, keys, values, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            scale=np.float32(q.shape[-1] ** -0.5 if scale is None else scale),
            window=np.int64(sliding_window or 0),
        )  # fmt: skip
        return out, (keys, values)
