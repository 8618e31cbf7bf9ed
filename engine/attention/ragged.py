"""The ragged paged attention kernel that ships with JAX (Jiang et al., arXiv 2604.15464), for TPU.

Its pages are `[page_size, 2 * num_kv_heads, head_dim]`, with K and V of a head side by side on the head axis. It only
reads them: the step's own keys and values are scattered into the donated pages before it runs.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from penstock.engine.attention.contract import PLAIN, AttentionBackend, CacheArray, KVCacheSpec
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES
from penstock.engine.models.attention_interface import QKV, AttentionOptions, KVScales, RaggedBatch, StackedCache

_LANES = 128
_QUERIES_PER_BLOCK = 32
_KEYS_PER_BLOCK = 1024
_MAX_PAGES_PER_BLOCK = 16
_BUFFER_BYTES = 8 * 2**20  # for the kernel's two blocks of pages, at most

# The kernel does not return the sums of weights that would be needed to add sinks afterwards.
NO_SINKS = "attention 'ragged' has no attention sinks, and the model's heads have; set auto, fused or xla"
# Its pages are padded to a number of KV heads that fits its tiles, so they do not tell the true number.
NO_SHARING = "attention 'ragged' has no layers that read the keys and values of others; set auto, fused or xla"


class RaggedKernelAttention(AttentionBackend):
    """Pads what the kernel cannot take: a head_dim that is not a multiple of 128, and odd numbers of KV heads.

    A head_dim above 128 is not supported.
    """

    name = "ragged"
    is_stacked = True
    quantized_dtypes = ()  # its scales are constants of the program, not per token or layer
    max_head_dim = _LANES

    def cache_dtype(self, dtype: str) -> str:
        return dtype

    def rows_moved(
        self, context: int, spec: KVCacheSpec, pages_per_seq: int, window: int | None = None
    ) -> tuple[int, int]:
        del window  # what lies behind it is masked, but read all the same
        _, page_size, combined, dim = self.cache_arrays(spec)[0].shape
        token_bytes = combined * dim * int(jnp.dtype(spec.dtype).itemsize)
        block = page_size * _pages_per_block(page_size, token_bytes, pages_per_seq)  # it reads whole blocks
        return -(-(context + 1) // block) * block, 1

    def cache_arrays(self, spec: KVCacheSpec) -> tuple[CacheArray]:
        heads = _padded_heads(spec.num_kv_heads, spec.dtype)
        dim = -(-spec.head_dim // _LANES) * _LANES
        shape = (spec.num_layers * spec.num_pages, spec.page_size, 2 * heads, dim)
        return (CacheArray(shape, spec.dtype, (None, None, "kv_heads", None)),)

    def prepare(self, batch: RaggedBatch, page_size: int) -> RaggedBatch:
        """Gives a step of only padding one sequence with one query: the kernel waits for its keys."""
        del page_size
        is_empty = batch.num_seqs[0] == 0
        return replace(
            batch,
            kv_lens=jnp.where(is_empty, 1, batch.kv_lens),
            cu_q_lens=batch.cu_q_lens.at[1].add(is_empty.astype(jnp.int32)),
            num_seqs=jnp.maximum(batch.num_seqs, 1),
        )

    def __call__(
        self,
        qkv: QKV,
        cache: StackedCache,
        prepared: RaggedBatch,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, StackedCache]:
        del kv_scales
        if sinks is not None:
            raise ConfigError(NO_SINKS)
        q, k, v = qkv
        if k is None or v is None:
            raise ConfigError(NO_SHARING)
        num_tokens, num_heads, head_dim = q.shape
        _, page_size, combined, dim = cache.pages.shape
        num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
        pages = _write(cache, k, v, prepared)

        extra = combined // 2 - num_kv_heads
        padded = jnp.pad(
            q.reshape(num_tokens, num_kv_heads, group, head_dim), ((0, 0), (0, extra), (0, 0), (0, dim - head_dim))
        )
        pages_per_seq = prepared.page_indices.shape[1]
        attended = ragged_paged_attention(
            padded.reshape(num_tokens, (num_kv_heads + extra) * group, dim),
            pltpu.with_memory_space_constraint(pages, pltpu.HBM),  # otherwise XLA copies a small cache into VMEM
            prepared.kv_lens,
            prepared.page_indices + cache.first_page,
            prepared.cu_q_lens,
            prepared.num_seqs,
            sm_scale=options.scale_for(head_dim),
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            num_kv_pages_per_block=_pages_per_block(page_size, combined * dim * pages.dtype.itemsize, pages_per_seq),
            num_queries_per_block=min(_QUERIES_PER_BLOCK, num_tokens),
            vmem_limit_bytes=VMEM_BYTES,
        )
        attended = attended.reshape(num_tokens, num_kv_heads + extra, group, dim)[:, :num_kv_heads, :, :head_dim]
        return attended.reshape(q.shape), StackedCache(pages, cache.first_page)


def _write(cache: StackedCache, k: jax.Array, v: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Returns the pages with this step's keys and values."""
    pages: jax.Array = cache.pages
    num_pages, page_size, combined, dim = pages.shape
    both = jnp.stack([k, jnp.nan_to_num(v)], axis=2).reshape(k.shape[0], -1, k.shape[2])
    both = jnp.pad(both, ((0, 0), (0, combined - both.shape[1]), (0, dim - both.shape[2])))
    slots = batch.slots + cache.first_page * page_size
    flat = pages.reshape(num_pages * page_size, combined, dim).at[slots].set(both.astype(pages.dtype))
    return flat.reshape(pages.shape)


def _padded_heads(num_kv_heads: int, dtype: str) -> int:
    """Returns the smallest number of KV heads, at least `num_kv_heads`, whose K and V fill the kernel's tiles.

    For the K and V heads of a token, the kernel takes 1, 2, 4 or a multiple of 8 rows of 32 bits.
    """
    packing = 4 // jnp.dtype(dtype).itemsize
    heads = num_kv_heads
    while (2 * heads) % packing or not (2 * heads // packing in (1, 2, 4) or (2 * heads // packing) % 8 == 0):
        heads += 1
    return heads


def _pages_per_block(page_size: int, bytes_per_token: int, pages_per_seq: int) -> int:
    wanted = min(_KEYS_PER_BLOCK, _BUFFER_BYTES // (2 * bytes_per_token)) // page_size
    return max(1, min(wanted, _MAX_PAGES_PER_BLOCK, pages_per_seq))
