"""Every attention implementation against the reference that JAX publishes with its ragged paged attention kernel."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from engine.attention import KVCacheSpec, RaggedBatch, XlaAttention
from engine.models import LayerCache

# (tokens of this step, tokens in all) of each sequence
RAGGED = {
    "decode only": [(1, 1), (1, 17), (1, 40), (1, 8)],
    "prefill only": [(5, 5), (13, 13)],
    "chunk behind earlier tokens": [(7, 30), (9, 9)],
    "mixed, decodes and chunks in any order": [(1, 33), (6, 21), (1, 2), (3, 3), (1, 16)],
    "more queries than a block holds": [(90, 100), (1, 50)],
    "one token": [(1, 1)],
}

MAX_LEN, MAX_SEQS = 160, 10
ATTENTION = XlaAttention()


@partial(jax.jit, static_argnums=5)
def run_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, batch: RaggedBatch, sliding_window: int | None
) -> tuple[jax.Array, LayerCache]:
    return ATTENTION(q, k, v, cache, batch, sliding_window=sliding_window)


def run(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    sliding_window: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the reference's values for the real tokens of one random batch, each f32."""
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

    spec = KVCacheSpec(1, num_pages, page_size, num_kv_heads, head_dim, dtype)
    (empty_keys, empty_values) = ATTENTION.init_cache(spec)[0]
    cache = (
        jnp.asarray(pages[:, :, 0::2].transpose(0, 2, 3, 1), dtype).reshape(empty_keys.shape),
        jnp.asarray(pages[:, :, 1::2].transpose(0, 2, 1, 3), dtype).reshape(empty_values.shape),
    )
    batch = RaggedBatch(*map(jnp.asarray, (slots, kv_lens, page_indices, cu_q_lens, count)))
    ours, (new_keys, new_values) = run_attention(*map(jnp.asarray, (q, k, v)), cache, batch, sliding_window)
    real = np.arange(1, num_pages)
    np.testing.assert_array_equal(np.asarray(new_keys, np.float32)[real], with_new[real, :, 0::2].transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(
        np.asarray(new_values, np.float32)[real], with_new[real, :, 1::2].transpose(0, 2, 1, 3)
    )
    reference = ref_ragged_paged_attention(
        jnp.asarray(q),
        jnp.asarray(with_new, dtype),
        *map(jnp.asarray, (kv_lens, page_indices, cu_q_lens, count)),
        sm_scale=head_dim**-0.5,
        sliding_window=sliding_window,
    )
    return np.asarray(ours, np.float32)[:num_real], np.asarray(reference, np.float32)[:num_real]


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    ours, reference = run(lengths)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize("sliding_window", [1, 5, 24])
def test_sliding_windows_equal_the_reference(sliding_window: int) -> None:
    ours, reference = run([(1, 33), (6, 21), (1, 2), (90, 100), (1, 17)], sliding_window=sliding_window)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 8), (6, 3, 20), (2, 2, 64)])
def test_odd_head_geometries_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    ours, reference = run(
        RAGGED["mixed, decodes and chunks in any order"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_and_page_sizes_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    kv_lens = rng.integers(1, 60, rng.integers(1, 9))
    lengths = [(int(rng.integers(1, kv_len + 1)) if rng.random() < 0.4 else 1, int(kv_len)) for kv_len in kv_lens]
    ours, reference = run(lengths, page_size=int([1, 4, 16, 32][seed]), seed=seed)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_bfloat16_is_as_close_as_its_precision() -> None:
    ours, reference = run(RAGGED["mixed, decodes and chunks in any order"], dtype="bfloat16")
    np.testing.assert_allclose(ours, reference, atol=3e-2)


def test_a_nan_spoils_its_own_sequence_but_not_the_next_holder_of_its_pages() -> None:
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
        return run_attention(x, x, x, cache, batch, None)

    broken = jnp.ones((4, 1, 8)).at[1].set(jnp.nan)
    out, cache = step(broken, ATTENTION.init_cache(spec)[0])
    assert jnp.isfinite(out[0]).all()
    assert jnp.isnan(out[1:]).all()
    for num_tokens in (1, 2):  # one decodes, the other prefills
        out, _ = step(jnp.ones((num_tokens, 1, 8)), cache)
        np.testing.assert_allclose(out, 1.0)
