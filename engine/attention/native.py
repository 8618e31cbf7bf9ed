"""Ragged paged attention for CPUs in C++; the kernel is `engine/kernels/cpu/attention.h`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from penstock.engine.attention.contract import (
    PLAIN,
    AttentionBackend,
    CacheArray,
    KVCacheSpec,
    scale_arrays,
)
from penstock.engine.kernels.cpu import ATTENTION, ATTENTION_INT8
from penstock.engine.kernels.cpu.layout import batch_arrays
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, LayerCache, RaggedBatch

_WORD_BYTES = 4


class NativeAttention(AttentionBackend):
    """Attention by the C++ kernel, whose library must be loaded.

    Keys are `[pages, num_kv_heads, head_dim / n, page_size, n]` and values `[pages, num_kv_heads, page_size / n,
    head_dim, n]`, with n elements to a 32-bit word; the last axis is left out if n is 1. They have the model's own
    type, f32 or bf16, or are int8 with scales. A model in f16 has its pages in f32, which needs no instruction to widen
    it.
    """

    name = "native"
    is_stacked = False
    quantized_dtypes = ("int8",)

    def __init__(self, *, kv_dtype: str | None = None) -> None:
        self._kv_dtype = kv_dtype  # None: follows the model's type

    def cache_dtype(self, dtype: str) -> str:
        return self._kv_dtype or ("float32" if dtype == "float16" else dtype)

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[tuple[CacheArray, ...], ...]:
        n = _WORD_BYTES // int(jnp.dtype(spec.dtype).itemsize)
        inner = () if n == 1 else (n,)
        k_shape = (spec.num_pages, spec.num_kv_heads, -(-spec.head_dim // n), spec.page_size, *inner)
        v_shape = (spec.num_pages, spec.num_kv_heads, -(-spec.page_size // n), spec.head_dim, *inner)
        axes = (None, "kv_heads", None, None, *(None for _ in inner))
        keys, values = (CacheArray(shape, spec.dtype, axes) for shape in (k_shape, v_shape))
        return ((keys, values, *scale_arrays(spec)),) * spec.num_layers

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
        kernel = ATTENTION if len(cache) == 2 else ATTENTION_INT8
        k, v = (jnp.zeros((0,), qkv.q.dtype) if part is None else part for part in qkv[1:])
        pages = zip(("keys", "values", "key_scales", "value_scales"), cache, strict=False)
        out, *written = kernel(
            {
                "q": qkv.q,
                "k": k,
                "v": v,
                **dict(pages),
                **batch_arrays(batch),
                "sinks": jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            },
            {"out": jax.typeof(qkv.q)},
            scale=options.scale_for(qkv.q.shape[-1]),
            window=options.sliding_window or 0,
            soft_cap=options.soft_cap or 0,
        )
        return out, tuple(written)
