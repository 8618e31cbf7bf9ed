"""Every attention implementation against the reference that JAX publishes with its ragged paged attention kernel."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from engine.attention import AttentionBackend, KVCacheSpec, RaggedBatch, attention_for
from engine.errors import ConfigError
from engine.models import LayerCache

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
MAX_LEN, MAX_SEQS = 160, 10
AXES = ((0, 2, 3, 1), (0, 2, 1, 3))
"""How keys and values of each implementation lie, from [pages, page_size, kv_heads, head_dim]."""


@cache
def implementation(name: str) -> AttentionBackend:
    return attention_for(name, "cpu", "float32", Path.home() / ".cache" / "penstock" / "native")


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=4)
def run_attention(
    name: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    batch: RaggedBatch,
    sliding_window: int | None,
) -> tuple[jax.Array, LayerCache]:
    return implementation(name)(q, k, v, cache, batch, sliding_window=sliding_window)


def compare(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    sliding_window: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    atol: float = 2e-5,
) -> None:
    """Holds every implementation to the reference on one random batch: what is attended, and what is in the pages."""
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
    reference = ref_ragged_paged_attention(
        jnp.asarray(q),
        jnp.asarray(with_new, dtype),
        *map(jnp.asarray, (kv_lens, page_indices, cu_q_lens, count)),
        sm_scale=head_dim**-0.5,
        sliding_window=sliding_window,
    )
    expected = np.asarray(reference, np.float32)[:num_real]
    for name in IMPLEMENTATIONS:
        halves = (pages[:, :, 0::2], pages[:, :, 1::2])
        cache = tuple(jnp.asarray(half.transpose(axes), dtype) for half, axes in zip(halves, AXES, strict=True))
        out, new = run_attention(name, *map(jnp.asarray, (q, k, v)), cache, batch, sliding_window)
        np.testing.assert_allclose(np.asarray(out, np.float32)[:num_real], expected, atol=atol, err_msg=name)
        for part, half, axes in zip(new, (with_new[:, :, 0::2], with_new[:, :, 1::2]), AXES, strict=True):
            np.testing.assert_array_equal(np.asarray(part, np.float32)[1:], half.transpose(axes)[1:], err_msg=name)


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    compare(lengths)


@pytest.mark.parametrize("sliding_window", [1, 5, 24])
def test_sliding_windows_equal_the_reference(sliding_window: int) -> None:
    compare([(1, 33), (6, 21), (1, 2), (90, 100), (1, 17)], sliding_window=sliding_window)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 8), (6, 3, 20), (2, 2, 64)])
def test_odd_head_geometries_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compare(RAGGED[MIXED], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_and_page_sizes_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    kv_lens = rng.integers(1, 60, rng.integers(1, 9))
    lengths = [(int(rng.integers(1, kv_len + 1)) if rng.random() < 0.4 else 1, int(kv_len)) for kv_len in kv_lens]
    compare(lengths, page_size=[1, 4, 16, 32][seed], seed=seed)


def test_bfloat16_is_as_close_as_its_precision() -> None:
    compare(RAGGED[MIXED], dtype="bfloat16", atol=3e-2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_nan_spoils_its_own_sequence_but_not_the_next_holder_of_its_pages(name: str) -> None:
    spec = KVCacheSpec(num_layers=1, num_pages=3, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32")

    def step(x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        num_tokens = x.shape[0]
        batch = RaggedBatch(
            slots=jnp.arange(4, 4 + num_tokens),
            kv_lens=jnp.asarray([num_tokens]),
            page_indices=jnp.asarray([[1]]),
            cu_q_lens=jnp.asarray([0, num_tokens]),
            num_seqs=jnp.asarray([1]),
        )
        return run_attention(name, x, x, x, cache, batch, None)

    broken = jnp.ones((4, 1, 8)).at[1].set(jnp.nan)
    out, cache = step(broken, implementation(name).init_cache(spec)[0])
    assert jnp.isfinite(out[0]).all()
    assert jnp.isnan(out[1:]).all()
    for num_tokens in (1, 2):  # one decodes, the other prefills
        out, cache = step(jnp.ones((num_tokens, 1, 8)), cache)
        np.testing.assert_allclose(out, 1.0)


@pytest.mark.parametrize(
    ("choice", "platform", "dtype", "names"),
    [
        ("flash", "cpu", "float32", "one of auto, native, xla, ragged, fused, not 'flash'"),
        ("native", "tpu", "bfloat16", "not bfloat16 on tpu"),
        ("native", "cpu", "float16", "not float16 on cpu"),
        ("auto", "tpu", "float16", "bfloat16 or float32, not float16; set dtype, or attention xla"),
    ],
)
def test_an_implementation_that_cannot_be_had_is_refused(
    choice: str, platform: str, dtype: str, names: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=names):
        attention_for(choice, platform, dtype, tmp_path)


def test_8_bit_pages_are_for_the_xla_form_and_native_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention 'native' has no kv_cache_dtype float8_e4m3fn; set attention xla"):
        attention_for("native", "cpu", "float32", tmp_path, kv_dtype="float8_e4m3fn")
    chosen = attention_for("auto", "cpu", "float32", tmp_path, kv_dtype="float8_e4m3fn")
    assert (chosen.name, chosen.cache_dtype("float32")) == ("xla", "float8_e4m3fn")


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_8_bit_pages_hold_what_their_precision_allows(num_tokens: int) -> None:
    """Three bits of mantissa: a key or value is at most 1/16 off, and one beyond the type's range is its largest."""
    attention = attention_for("xla", "cpu", "float32", Path(), kv_dtype="float8_e4m3fn")
    spec = KVCacheSpec(num_layers=1, num_pages=3, page_size=8, num_kv_heads=2, head_dim=16, dtype="float8_e4m3fn")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(num_tokens, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    v = v.at[0, 0, 0].set(1e4)
    batch = RaggedBatch(
        slots=jnp.arange(8, 8 + num_tokens),
        kv_lens=jnp.asarray([num_tokens]),
        page_indices=jnp.asarray([[1, 2]]),
        cu_q_lens=jnp.asarray([0, num_tokens]),
        num_seqs=jnp.asarray([1]),
    )
    out, (_, values) = jax.jit(attention)(q, k, v, attention.init_cache(spec)[0], batch)
    exact = attention_for("xla", "cpu", "float32", Path())
    cut = v.at[0, 0, 0].set(448.0)
    expected, _ = jax.jit(exact)(q, k, cut, exact.init_cache(replace(spec, dtype="float32"))[0], batch)
    assert values.dtype == "float8_e4m3fn"
    assert float(values[1, 0, 0, 0].astype(jnp.float32)) == 448.0
    np.testing.assert_allclose(out, expected, rtol=0.2, atol=0.2)
    assert not np.allclose(out, expected, atol=1e-4)


def test_without_a_compiler_auto_falls_back_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert type(attention_for("auto", "cpu", "float32", tmp_path)).__name__ == "XlaAttention"
    with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler"):
        attention_for("native", "cpu", "float32", tmp_path)
