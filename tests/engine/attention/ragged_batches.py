"""Random ragged batches, on which attention implementations are compared with a reference in NumPy.

The reference is itself compared with the one that JAX publishes, which compiles each operation anew for each length.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from penstock.engine.attention import AttentionBackend, RaggedBatch, attention_for
from penstock.engine.attention.contract import PLAIN
from penstock.engine.attention.triton import TritonAttention
from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.models import QKV, AttentionOptions, LayerCache
from penstock.engine.models.attention_interface import KVScales

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
"""Order of the axes of each implementation's keys and values, from [pages, page_size, kv_heads, head_dim]."""


FP8 = "float8_e4m3fn"
QUANTIZED = [*(f"{name} int8" for name in IMPLEMENTATIONS), f"xla {FP8}"]


@cache
def implementation(name: str) -> AttentionBackend:
    if name == TRITON:
        return TritonAttention(num_programs=16, interpret=True)
    form, _, kv_dtype = name.partition(" ")
    library = NativeLibrary(DEFAULT_BUILD_DIR / "native")
    return attention_for(form, "cpu", "float32", library, kv_dtype=kv_dtype or None)


@partial(jax.jit, static_argnames=("name", "options"), donate_argnames="cache")
def run_attention(
    name: str,
    qkv: QKV,
    cache: LayerCache,
    batch: RaggedBatch,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
    kv_scales: KVScales | None = None,
) -> tuple[jax.Array, LayerCache]:
    return implementation(name)(qkv, cache, batch, options=options, sinks=sinks, kv_scales=kv_scales)


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
) -> np.ndarray:
    """Returns the attention over pages that hold the new keys and values too: f32 [num_real, num_heads, head_dim]."""
    outputs = []
    for i in range(num_seqs):
        q_len, kv_len = cu_q_lens[i + 1] - cu_q_lens[i], kv_lens[i]
        mine = q[cu_q_lens[i] : cu_q_lens[i + 1]].astype(np.float32)
        held = kv_pages[page_indices[i]].reshape(-1, *kv_pages.shape[2:])[:kv_len].astype(np.float32)
        group = q.shape[1] // (kv_pages.shape[2] // 2)
        k, v = (held[:, part::2].repeat(group, axis=1) for part in (0, 1))
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


def without_passed(
    page_indices: np.ndarray, lengths: Sequence[tuple[int, int]], sliding_window: int, page_size: int
) -> np.ndarray:
    """Returns the table after pages were freed that the window of each sequence's first query has passed."""
    table = page_indices.copy()
    for i, (q_len, kv_len) in enumerate(lengths):
        table[i, : max(0, kv_len - q_len - sliding_window + 1) // page_size] = 0
    return table


def random_qkv(
    rng: np.random.Generator, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (
        rng.normal(size=(num_tokens, heads, head_dim)).astype(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return q, k, v


def random_sinks(num_heads: int) -> np.ndarray:
    """Returns sinks of all sizes: one takes next to nothing of the weights, another nearly all of them."""
    return np.random.default_rng(5).permutation(np.linspace(-8.0, 8.0, num_heads)).astype(np.float32)


@dataclass(frozen=True)
class PagedBatch:
    """Sequences whose pages are anywhere: the arrays that a step gets of each token and sequence."""

    lengths: Sequence[tuple[int, int]]
    page_size: int
    slots: np.ndarray  # i32 [num_tokens]
    kv_lens: np.ndarray  # i32 [max_seqs]
    page_indices: np.ndarray  # i32 [max_seqs, pages_per_seq]
    cu_q_lens: np.ndarray  # i32 [max_seqs + 1]

    @classmethod
    def random(
        cls,
        lengths: Sequence[tuple[int, int]],
        *,
        page_size: int,
        max_seqs: int,
        max_len: int,
        num_tokens: int,
        seed: int,
    ) -> Self:
        """Makes a batch of `num_tokens` tokens; the tokens behind all sequences' are padding."""
        pages_per_seq = -(-max_len // page_size)
        free = np.random.default_rng(seed).permutation(np.arange(1, max_seqs * pages_per_seq + 1))
        page_indices, kv_lens = np.zeros((max_seqs, pages_per_seq), np.int32), np.zeros(max_seqs, np.int32)
        for i, (_, kv_len) in enumerate(lengths):
            used = -(-kv_len // page_size)
            page_indices[i, :used], free = free[:used], free[used:]
            kv_lens[i] = kv_len
        ends = np.cumsum([0, *(q_len for q_len, _ in lengths)])
        cu_q_lens = np.full(max_seqs + 1, ends[-1], np.int32)
        cu_q_lens[: len(ends)] = ends
        slots = np.arange(num_tokens, dtype=np.int32) % page_size
        made = cls(lengths, page_size, slots, kv_lens, page_indices, cu_q_lens)
        for i, (q_len, kv_len) in enumerate(lengths):
            slots[ends[i] : ends[i + 1]] = made.slots_of(i)[kv_len - q_len :]
        return made

    @property
    def num_pages(self) -> int:
        return self.page_indices.size + 1

    @property
    def num_real(self) -> int:
        return int(self.cu_q_lens[-1])

    def slots_of(self, i: int) -> np.ndarray:
        """Returns the slots of all tokens of a sequence."""
        place = np.arange(self.kv_lens[i])
        slots: np.ndarray = self.page_indices[i, place // self.page_size] * self.page_size + place % self.page_size
        return slots

    def held(self) -> np.ndarray:
        """Returns the slots of all tokens that are there after the step."""
        return np.concatenate([self.slots_of(i) for i in range(len(self.lengths))])

    def seen_through(self, sliding_window: int | None) -> RaggedBatch:
        """Returns the batch as a step gets it, without the pages that a window has passed."""
        table = self.page_indices
        if sliding_window is not None:
            table = without_passed(table, self.lengths, sliding_window, self.page_size)
        count = np.array([len(self.lengths)], np.int32)
        return RaggedBatch(*map(jnp.asarray, (self.slots, self.kv_lens, table, self.cu_q_lens, count)))


def compare(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    has_sinks: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    atol: float = 2e-5,
    names: Sequence[str] = IMPLEMENTATIONS,
    **options: Any,
) -> None:
    """Compares attention and pages of implementations with the reference, on one random batch."""
    num_tokens = 128 if sum(q_len for q_len, _ in lengths) > 32 else 32
    batch = PagedBatch.random(
        lengths, page_size=page_size, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=num_tokens, seed=seed
    )
    rng = np.random.default_rng(seed)
    q, k, v = random_qkv(rng, num_tokens, num_heads, num_kv_heads, head_dim, dtype)
    sinks = random_sinks(num_heads).astype(dtype) if has_sinks else None
    before, after = _pages(batch, k, v, rng, is_windowed="sliding_window" in options)
    expected = reference_attention(
        q,
        after,
        *(batch.kv_lens, batch.page_indices, batch.cu_q_lens),
        len(lengths),
        scale=head_dim**-0.5,
        sinks=None if sinks is None else sinks.astype(np.float32),
        **options,
    )
    for name in names:
        step = batch.seen_through(options.get("sliding_window"))
        qkv = QKV(*map(jnp.asarray, (q, k, v)))
        out, new = run_attention(name, qkv, _halves(before, name, dtype), step, AttentionOptions(**options), sinks)
        np.testing.assert_allclose(np.asarray(out, np.float32)[: batch.num_real], expected, atol=atol, err_msg=name)
        for part, half in zip(new, _halves(after, name, dtype), strict=True):
            np.testing.assert_array_equal(
                np.asarray(part, np.float32)[1:], np.asarray(half, np.float32)[1:], err_msg=name
            )


def _pages(
    batch: PagedBatch, k: np.ndarray, v: np.ndarray, rng: np.random.Generator, *, is_windowed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pages before and after the step: f32 [num_pages, page_size, 2 * num_kv_heads, head_dim], K and V
    interleaved.
    """
    num_kv_heads, head_dim = k.shape[1:]
    pages = np.full((batch.num_pages, batch.page_size, 2 * num_kv_heads, head_dim), 9.0, np.float32)  # stale
    held = batch.held()
    pages.reshape(-1, 2 * num_kv_heads, head_dim)[held] = rng.normal(
        size=(len(held), 2 * num_kv_heads, head_dim)
    ).astype(k.dtype)
    after, written = pages.copy(), batch.slots[: batch.num_real]
    new = after.reshape(-1, 2 * num_kv_heads, head_dim)
    new[written, 0::2], new[written, 1::2] = k[: batch.num_real], v[: batch.num_real]
    if is_windowed:
        pages[0, :, 0::2] = np.nan  # keys alone: no page holds a NaN among its values
    return pages, after


def _halves(pages: np.ndarray, name: str, dtype: str) -> LayerCache:
    """Splits pages into keys and values as an implementation lays them out."""
    halves = (pages[:, :, 0::2], pages[:, :, 1::2])
    laid_out = [half.transpose(axes) for half, axes in zip(halves, AXES[name], strict=True)]
    if name == "native":
        dtype = implementation(name).cache_dtype(dtype)
        laid_out = [in_words(half, dtype) for half in laid_out]
    return tuple(jnp.asarray(half, dtype) for half in laid_out)


def in_words(half: np.ndarray, dtype: str) -> np.ndarray:
    """Cuts the third of four axes into 32-bit words, as the C++ kernel lays out keys and values."""
    n = 4 // jnp.dtype(dtype).itemsize
    if n == 1:
        return half
    padded = np.pad(half, ((0, 0), (0, 0), (0, -half.shape[2] % n), (0, 0)))
    return padded.reshape(*half.shape[:2], -1, n, half.shape[3]).swapaxes(3, 4)
