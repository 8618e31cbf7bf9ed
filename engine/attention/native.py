"""Ragged paged attention for CPUs in C++; the kernel is `engine/native/attention.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.attention.contract import (
    PLAIN,
    AttentionBackend,
    CacheArray,
    KVCacheSpec,
    transposed_keys,
)
from penstock.engine.models.attend import QKV, AttentionOptions, LayerCache, RaggedBatch
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
        return transposed_keys(spec)

    def __call__(
        self,
        qkv: QKV,
        cache: LayerCache,
        batch: RaggedBatch,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        (q, k, v), (keys, values) = qkv, cache
        out_types = [jax.typeof(array) for array in (q, keys, values)]
        call = jax.ffi.ffi_call(ATTENTION, out_types, input_output_aliases={3: 1, 4: 2})
        out, keys, values = call(
            q, k, v, keys, values, batch.slots, batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs,
            jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            scale=np.float32(options.scale_for(q.shape[-1])),
            window=np.int64(options.sliding_window or 0),
            soft_cap=np.float32(options.soft_cap or 0),
        )  # fmt: skip
        return out, (keys, values)
