"""Every attention implementation against the reference, and the reference against the one JAX publishes with its
kernel.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from penstock.engine.attention import KVCacheSpec, RaggedBatch, attention_for
from penstock.engine.attention.ragged import RaggedKernelAttention
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.models import QKV, LayerCache
from tests.engine.attention.ragged_batches import (
    IMPLEMENTATIONS,
    MIXED,
    QUANTIZED,
    RAGGED,
    TRITON,
    compare,
    implementation,
    reference_attention,
    run_attention,
)
from tests.support.patience import slow


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        slow({}, "bfloat16"),
        ({"sliding_window": 3}, "float32"),
        slow({"soft_cap": 2.0}, "float32"),
    ],
    ids=str,
)
def test_our_reference_is_the_one_that_jax_publishes(options: dict[str, Any], dtype: str) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(16, 6, 8)).astype(dtype)
    pages = rng.normal(size=(10, 4, 4, 8)).astype(dtype)
    kv_lens, page_indices = np.array([7, 9, 9], np.int32), rng.permutation(np.arange(1, 10, dtype=np.int32))
    rows = (kv_lens, page_indices.reshape(3, 3), np.array([0, 1, 5, 14], np.int32))
    ours = reference_attention(q, pages, *rows, 3, scale=0.6, **options)
    published = ref_ragged_paged_attention(
        *map(jnp.asarray, (q, pages, *rows, np.array([3], np.int32))), sm_scale=0.6, **options
    )
    np.testing.assert_allclose(ours, np.asarray(published, np.float32), atol=1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    compare(lengths)


@pytest.mark.parametrize("sliding_window", [1, slow(5), 24])
def test_sliding_windows_equal_the_reference(sliding_window: int) -> None:
    compare([(1, 33), (6, 21), (1, 2), (90, 100), (1, 17)], sliding_window=sliding_window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "options"),
    [
        (4, 2, {}),
        (5, 1, {"sliding_window": 5}),
        (6, 3, {"sliding_window": 1}),
        (6, 2, {"dtype": "bfloat16", "atol": 3e-2}),
        (6, 2, {"dtype": "float16", "atol": 2e-3}),
    ],
)
def test_sinks_take_their_share_of_the_weights(num_heads: int, num_kv_heads: int, options: dict[str, Any]) -> None:
    lengths = [(1, 33), (6, 21), (1, 1), (90, 100), (1, 130)]
    compare(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, has_sinks=True, **options)


@pytest.mark.parametrize("soft_cap", [slow(0.3), 2.0, slow(50.0)])
def test_capped_scores_equal_the_reference(soft_cap: float) -> None:
    compare(RAGGED[MIXED], soft_cap=soft_cap)
    odd: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 20}
    compare([(1, 33), (6, 21), (90, 100)], soft_cap=soft_cap, sliding_window=7, **odd)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 8), (6, 3, 20), slow(2, 2, 64)])
def test_odd_head_geometries_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compare(RAGGED[MIXED], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("seed", [0, slow(1), 2, slow(3)])
def test_random_batches_and_page_sizes_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    kv_lens = rng.integers(1, 60, rng.integers(1, 9))
    lengths = [(int(rng.integers(1, kv_len + 1)) if rng.random() < 0.4 else 1, int(kv_len)) for kv_len in kv_lens]
    compare(lengths, page_size=[1, 4, 16, 32][seed], seed=seed)


def test_bfloat16_is_as_close_as_its_precision() -> None:
    compare(RAGGED[MIXED], dtype="bfloat16", atol=3e-2)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, *QUANTIZED, TRITON])
def test_a_nan_spoils_its_own_sequence_but_not_the_next_holder_of_its_pages(name: str) -> None:
    dtype = implementation(name).cache_dtype("float32")
    spec = KVCacheSpec(num_layers=1, num_pages=3, page_size=4, num_kv_heads=1, head_dim=8, dtype=dtype)

    def step(x: jax.Array, num_tokens: int, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Computes one step; `x` is padded to 4 tokens."""
        batch = RaggedBatch(
            slots=jnp.where(jnp.arange(4) < num_tokens, jnp.arange(4, 8), 0),
            kv_lens=jnp.asarray([num_tokens]),
            page_indices=jnp.asarray([[1]]),
            cu_q_lens=jnp.asarray([0, num_tokens]),
            num_seqs=jnp.asarray([1]),
        )
        found: tuple[jax.Array, Any] = run_attention(name, QKV(x, x, x), cache, batch)
        return found

    broken = jnp.ones((4, 1, 8)).at[1].set(jnp.nan)
    out, cache = step(broken, 4, implementation(name).init_cache(spec)[0])
    assert jnp.isfinite(out[0]).all()
    assert jnp.isnan(out[1:]).all()
    for num_tokens in (1, 2):  # one decodes, the other prefills
        out, cache = step(jnp.ones((4, 1, 8)), num_tokens, cache)
        np.testing.assert_allclose(out[:num_tokens], 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("choice", "platform", "dtype", "names"),
    [
        ("flash", "cpu", "float32", "one of auto, native, xla, triton, ragged, fused, not 'flash'"),
        ("native", "tpu", "bfloat16", "not bfloat16 on tpu"),
        ("triton", "cpu", "float32", "for GPU, not cpu"),
        ("triton", "tpu", "bfloat16", "for GPU, not tpu"),
        ("fused", "gpu", "bfloat16", "for TPU, not gpu"),
        ("native", "cpu", "float64", "not float64 on cpu"),
        ("auto", "tpu", "float16", "bfloat16 or float32, not float16; set dtype, or attention xla"),
    ],
)
def test_an_implementation_that_cannot_be_had_is_refused(
    choice: str, platform: str, dtype: str, names: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=names):
        attention_for(choice, platform, dtype, NativeLibrary(tmp_path))


def test_the_kernel_of_jax_has_no_sinks_and_says_so(tmp_path: Path) -> None:
    chosen = partial(attention_for, platform="tpu", dtype="bfloat16", library=NativeLibrary(tmp_path), has_sinks=True)
    with pytest.raises(ConfigError, match=r"attention 'ragged' has no attention sinks, .* set auto, fused or xla"):
        chosen("ragged")
    assert [chosen(setting).name for setting in ("auto", "fused", "xla")] == ["fused", "fused", "xla"]
    x = jnp.ones((16, 2, 64))
    with pytest.raises(ConfigError, match="no attention sinks"):
        RaggedKernelAttention()(QKV(x, x, x), None, None, sinks=jnp.ones(2))  # type: ignore[arg-type]


def test_8_bit_pages_are_for_the_xla_form_and_native_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention 'native' has no kv_cache_dtype float8_e4m3fn; set attention xla"):
        attention_for("native", "cpu", "float32", NativeLibrary(tmp_path), kv_dtype="float8_e4m3fn")
    chosen = attention_for("auto", "cpu", "float32", NativeLibrary(tmp_path), kv_dtype="float8_e4m3fn")
    assert (chosen.name, chosen.cache_dtype("float32")) == ("xla", "float8_e4m3fn")


def test_without_a_compiler_auto_falls_back_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert type(attention_for("auto", "cpu", "float32", NativeLibrary(tmp_path))).__name__ == "XlaAttention"
    with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler"):
        attention_for("native", "cpu", "float32", NativeLibrary(tmp_path))
