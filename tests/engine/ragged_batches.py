"""Random ragged batches, on which attention implementations are held to a reference in NumPy.

That one is held to the reference that JAX publishes, which compiles each operation anew for each length.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.attention import AttentionBackend, RaggedBatch, attention_for
from penstock.engine.attention.contract import PLAIN
from penstock.engine.attention.triton import TritonAttention
from penstock.engine.deployment import DEFAULT_BUILD_DIR
from penstock.engine.models import QKV, AttentionOptions, LayerCache
from penstock.engine.native import NativeLibrary

MIXED = "mixed, decodes and chunks in any order"
# (tokens of this step, tokens in all) of each sequence
RAGGED = {
    "decode only": [(1, 1), (1, 17), (1, 40), (1, 8)],
    "prefill only": [(5, 5), (13, 13)],
    "chunk behind earlier tokens": [(7, 30), (9, 9)],
    MIXED: [(1, 33), (6, 21), (1, 2), (3, 3), (1, 16)],
    "more queries than a block holds": [(90, 100), (1, 50)],
    "one token": [(1, 1)],
}

IMPLEMENTATIONS = ["xla", *(["native"] if any(map(shutil.which, ("c++", "g++", "clang++"))) else [])]
TRITON = "triton"  # interpreted
MAX_LEN, MAX_SEQS = 160, 10
_BY_HEAD = (0, 2, 1, 3)
AXES = {"xla": ((0, 2, 3, 1), _BY_HEAD), "native": ((0, 2, 3, 1), _BY_HEAD), TRITON: (_BY_HEAD, _BY_HEAD)}
"""How keys and values of each implementation lie, from [pages, page_size, kv_heads, head_dim]."""


@cache
def implementation(name: str) -> AttentionBackend:
    if name == TRITON:
        return TritonAttention(num_programs=16, interpret=True)
    return attention_for(name, "cpu", "float32", NativeLibrary(DEFAULT_BUILD_DIR / "native"))


@partial(jax.jit, static_argnames=("name", "options"), donate_argnames="cache")
def run_attention(
    name: str,
    qkv: QKV,
    cache: LayerCache,
    batch: RaggedBatch,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    return implementation(name)(qkv, cache, batch, options=options, sinks=sinks)


def reference_attention(
    q: np.ndarray,  # [num_tokens, num_heads, head_dim]
    kv_pages: np.ndarray,  # [num_pages, page_size, 2 * num_kv_heads, head_dim]; K and V interleaved
    kv_lens: np.ndarray,  # i32[max_seqs]
    page_indices: np.ndarray,  # i32[max_seqs, pages_per_seq]
    cu_q_lens: np.ndarray,  # i32[max_seqs + 1]
    num_seqs: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,  # [num_heads]
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> np.ndarray:
    """What is attended over pages that already hold the new keys and values: f32 [num_real, num_heads, head_dim]."""
    outputs = []
    for i in range(num_seqs):
        q_len, kv_len = cu_q_lens[i + 1] - cu_q_lens[i], kv_lens[i]
        mine = q[cu_q_lens[i] : cu_q_lens[i + 1]].astype(np.float32)
        held = kv_pages[page_indices[i]].reshape(-1, *kv_pages.shape[2:])[:kv_len].astype(np.float32)
        group = q.shape[1] // (kv_pages.shape[2] // 2)
        k, v = held[:, 0::2].repeat(group, axis=1) * k_scale, held[:, 1::2].repeat(group, axis=1) * v_scale
        scores = np.einsum("qhd,khd->hqk", mine, k) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        places, keys = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)
        is_seen = keys <= places
        if sliding_window is not None:
            is_seen &= keys > places - sliding_window
        top = scores.max(-1, keepdims=True)
        sink_weights = 0.0
        if sinks is not None:
            top = np.maximum(top, sinks[:, None, None])
            sink_weights = np.exp(sinks[:, None, None] - top)
        weights = np.where(is_seen, np.exp(scores - top), 0.0)
        outputs.append(np.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdims=True) + sink_weights), v))
    return np.concatenate(outputs)


def random_sinks(num_heads: int) -> np.ndarray:
    """Of all sizes: one takes next to nothing of the weights, another nearly all of them."""
    return np.random.default_rng(5).permutation(np.linspace(-8.0, 8.0, num_heads)).astype(np.float32)


def compare(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    atol: float = 2e-5,
    names: Sequence[str] = IMPLEMENTATIONS,
) -> None:
    """Holds implementations to the reference on one random batch: what is attended, and what is in the pages."""
    rng = np.random.default_rng(seed)
    pages_per_seq = -(-MAX_LEN // page_size)
    num_pages = MAX_SEQS * pages_per_seq + 1
    free = rng.permutation(np.arange(1, num_pages))
    num_real = sum(q_len for q_len, _ in lengths)
    num_tokens = 128 if num_real > 32 else 32

    pages = np.full((num_pages, page_size, 2 * num_kv_heads, head_dim), 9.0, np.float32)  # stale
    page_indices = np.zeros((MAX_SEQS, pages_per_seq), np.int32)
    slots = np.arange(num_tokens, dtype=np.int32) % page_size
    q = rng.normal(size=(num_tokens, num_heads, head_dim)).astype(dtype)
    k = rng.normal(size=(num_tokens, num_kv_heads, head_dim)).astype(dtype)
    v = rng.normal(size=(num_tokens, num_kv_heads, head_dim)).astype(dtype)
    sinks = random_sinks(num_heads).astype(dtype) if has_sinks else None
    start = 0
    with_new = pages.copy()
    for i, (q_len, kv_len) in enumerate(lengths):
        used = -(-kv_len // page_size)
        page_indices[i, :used], free = free[:used], free[used:]
        slot = page_indices[i, np.arange(kv_len) // page_size] * page_size + np.arange(kv_len) % page_size
        old = kv_len - q_len
        before = rng.normal(size=(old, 2 * num_kv_heads, head_dim)).astype(dtype)
        slots[start : start + q_len] = slot[old:]
        for flat in (pages, with_new):
            flat.reshape(-1, 2 * num_kv_heads, head_dim)[slot[:old]] = before
        new = with_new.reshape(-1, 2 * num_kv_heads, head_dim)
        new[slot[old:], 0::2], new[slot[old:], 1::2] = k[start : start + q_len], v[start : start + q_len]
        start += q_len
    cu_q_lens = np.full(MAX_SEQS + 1, num_real, np.int32)
    cu_q_lens[: len(lengths) + 1] = np.cumsum([0, *(q_len for q_len, _ in lengths)])
    kv_lens = np.zeros(MAX_SEQS, np.int32)
    kv_lens[: len(lengths)] = [kv_len for _, kv_len in lengths]
    count = np.array([len(lengths)], np.int32)

    batch = RaggedBatch(*map(jnp.asarray, (slots, kv_lens, page_indices, cu_q_lens, count)))
    expected = reference_attention(
        q,
        with_new,
        *(kv_lens, page_indices, cu_q_lens),
        len(lengths),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(np.float32),
    )
    options = AttentionOptions(sliding_window, soft_cap=soft_cap)
    for name in names:
        halves = (pages[:, :, 0::2], pages[:, :, 1::2])
        cache = tuple(jnp.asarray(half.transpose(axes), dtype) for half, axes in zip(halves, AXES[name], strict=True))
        out, new = run_attention(name, QKV(*map(jnp.asarray, (q, k, v))), cache, batch, options, sinks)
        np.testing.assert_allclose(np.asarray(out, np.float32)[:num_real], expected, atol=atol, err_msg=name)
        for part, half, axes in zip(new, (with_new[:, :, 0::2], with_new[:, :, 1::2]), AXES[name], strict=True):
            np.testing.assert_array_equal(np.asarray(part, np.float32)[1:], half.transpose(axes)[1:], err_msg=name)
