"""8-bit keys and values with a scale for each token and head: what pages hold, and the attention over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.attention import KVCacheSpec, attention_for
from penstock.engine.attention.contract import CacheArray
from penstock.engine.attention.quantization import quantized_by_token
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.models import QKV, AttentionOptions, LayerCache
from penstock.engine.models.attention_interface import KVScales
from tests.engine.attention.ragged_batches import (
    AXES,
    FP8,
    MIXED,
    QUANTIZED,
    RAGGED,
    PagedBatch,
    implementation,
    in_words,
    random_qkv,
    random_sinks,
    reference_attention,
    run_attention,
)

MAX_LEN, MAX_SEQS = 160, 5


def codes_of(x: np.ndarray, dtype: str, scales: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8-bit codes and the scale of each row. Rows have scales of their own unless `scales`, which broadcast to
    rows, are given.
    """
    top = {"int8": 127, FP8: 448}[dtype]
    found = np.abs(x).max(-1) * np.float32(1 / top) if scales is None else np.broadcast_to(scales, x.shape[:-1])
    codes = (x * (1 / found)[..., None]).clip(-top, top)
    return (np.rint(codes) if dtype == "int8" else codes).astype(jnp.dtype(dtype)), found


def laid_out(name: str, held: np.ndarray, scales: np.ndarray | None = None) -> LayerCache:
    """Lays pages out as an implementation does.

    `held` is f32 [num_pages, page_size, 2 * num_kv_heads, head_dim], with K and V interleaved; so are `scales`, [2 *
    num_kv_heads], if given.
    """
    form, dtype = name.split()
    (keys, key_scales), (values, value_scales) = (
        codes_of(held[:, :, i::2], dtype, None if scales is None else scales[i::2]) for i in (0, 1)
    )
    codes = [part.transpose(axes) for part, axes in zip((keys, values), AXES[form], strict=True)]
    if form == "native":
        codes = [in_words(part, dtype) for part in codes]
    return tuple(map(jnp.asarray, (*codes, key_scales.swapaxes(1, 2), value_scales.swapaxes(1, 2))))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "has_sinks", "options"),
    [
        (4, 2, 32, 16, False, {}),
        (6, 2, 20, 8, True, {}),
        (5, 1, 18, 3, False, {"sliding_window": 5}),
        (16, 1, 16, 32, False, {"soft_cap": 2.0}),
    ],
    ids=str,
)
def test_pages_hold_codes_and_what_is_attended_is_theirs(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    has_sinks: bool,
    options: dict[str, Any],
) -> None:
    check(name, num_heads, num_kv_heads, head_dim, page_size, has_sinks=has_sinks, **options)


@pytest.mark.parametrize(
    "options", [{"sliding_window": 5, "soft_cap": 2.0}, {"scale": 0.3, "sliding_window": 33}], ids=str
)
def test_scales_that_are_given_take_the_place_of_the_tokens_own(options: dict[str, Any]) -> None:
    """The scales are not powers of two, and so small that some keys and values are clipped."""
    scales = np.array([0.0017, 0.0031, 0.0053, 0.0011], np.float32)
    check(f"xla {FP8}", 6, 2, 32, 16, has_sinks=True, scales=scales, **options)


def check(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    has_sinks: bool,
    scales: np.ndarray | None = None,  # f32 [2 * num_kv_heads], of keys and values in turns
    **options: Any,
) -> None:
    """Compares pages with codes and scales from NumPy, to the bit, and attention with the values that they
    stand for.
    """
    lengths = [*RAGGED[MIXED][:3], (90, 140)]
    rng = np.random.default_rng(0)
    batch = PagedBatch.random(lengths, page_size=page_size, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=128, seed=0)
    q, k, v = random_qkv(rng, 128, num_heads, num_kv_heads, head_dim, "float32")
    k *= rng.uniform(0.01, 2, (128, 1, 1)).astype(np.float32)  # tokens of all sizes
    sinks = random_sinks(num_heads) if has_sinks else None
    before = rng.normal(size=(batch.num_pages, page_size, 2 * num_kv_heads, head_dim)).astype(np.float32)
    after, written = before.copy(), batch.slots[: batch.num_real]
    new = after.reshape(-1, 2 * num_kv_heads, head_dim)
    new[written, 0::2], new[written, 1::2] = k[: batch.num_real], v[: batch.num_real]

    given = None if scales is None else KVScales(jnp.asarray(scales[0::2]), jnp.asarray(scales[1::2]))
    qkv, step = QKV(*map(jnp.asarray, (q, k, v))), batch.seen_through(options.get("sliding_window"))
    out, cache = run_attention(
        name, qkv, laid_out(name, before, scales), step, AttentionOptions(**options), sinks, given
    )
    for part, expected in zip(cache, laid_out(name, after, scales), strict=True):
        np.testing.assert_array_equal(np.asarray(part)[1:], np.asarray(expected)[1:])
    codes, scales = codes_of(after, name.split()[1], scales)
    codes = codes.astype(np.float32)
    expected = reference_attention(
        q,
        codes * scales[..., None],
        *(batch.kv_lens, batch.page_indices, batch.cu_q_lens),
        len(lengths),
        **{"scale": head_dim**-0.5, **options},
        sinks=sinks,
    )
    np.testing.assert_allclose(np.asarray(out)[: batch.num_real], expected, atol=4e-3)
    assert np.abs(np.asarray(out)[: batch.num_real] - expected).mean() < 2e-4


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_are_arrays_of_the_cache(name: str) -> None:
    """So their bytes are counted with the cache's."""
    backend = implementation(name)
    spec = KVCacheSpec(2, num_pages=7, page_size=16, num_kv_heads=3, head_dim=32, dtype=backend.cache_dtype("bfloat16"))
    layers: tuple[tuple[CacheArray, ...], ...] = backend.cache_arrays(spec)
    assert len(layers) == 2
    num_bytes = sum(array.num_bytes for array in layers[0])
    assert num_bytes == 7 * 16 * 3 * 2 * (32 + 4)
    assert [array.shape for array in layers[0][2:]] == [(7, 3, 16)] * 2
    assert [array.axes[1] for array in layers[0]] == ["kv_heads"] * 4


@pytest.mark.parametrize("kv_dtype", ["int8", FP8])
@pytest.mark.parametrize(
    ("setting", "platform", "remedy"),
    [
        ("ragged", "tpu", ", as it reads no scales of tokens; set attention fused"),
        ("triton", "gpu", "; set attention xla"),
    ],
)
def test_kernels_that_read_no_scales_refuse_it(
    setting: str, platform: str, remedy: str, kv_dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"attention '{setting}' has no kv_cache_dtype {kv_dtype}{remedy}"):
        attention_for(setting, platform, "bfloat16", NativeLibrary(tmp_path), kv_dtype=kv_dtype)


def test_where_there_is_no_kernel_auto_takes_the_xla_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for platform, dtype in (("cpu", "float32"), ("cpu", "float16"), ("gpu", "bfloat16")):
        chosen = attention_for("auto", platform, dtype, NativeLibrary(tmp_path), kv_dtype="int8")
        assert (chosen.name, chosen.cache_dtype(dtype)) == ("xla", "int8")


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_cannot_be_scaled_is_zero_or_spoils_its_own_sequence(name: str) -> None:
    """Values have zeros and numbers without an inverse, and a key is infinite."""
    spec = KVCacheSpec(num_layers=1, num_pages=2, page_size=16, num_kv_heads=1, head_dim=16, dtype=name.split()[1])
    batch = PagedBatch.random([(4, 4)], page_size=16, max_seqs=1, max_len=16, num_tokens=4, seed=0)
    k = jnp.ones((4, 1, 16)).at[3, 0, 0].set(jnp.inf)
    v = jnp.asarray([0.0, 1e-38, jnp.inf, 1.0]).reshape(4, 1, 1) * jnp.ones((4, 1, 16))
    out, cache = run_attention(name, QKV(k, k, v), implementation(name).init_cache(spec)[0], batch.seen_through(None))
    np.testing.assert_allclose(out[:3], 0.0, atol=1e-30)
    assert jnp.isnan(out[3]).all()
    assert jnp.isfinite(cache[3]).all()
    assert jax.tree.map(lambda array: array.dtype.name, cache) == (spec.dtype, spec.dtype, "float32", "float32")


def test_what_cannot_be_scaled_spoils_its_own_sequence_whatever_scale_is_given() -> None:
    x = jnp.asarray([[1.0, jnp.inf], [jnp.nan, 1.0], [3.0, -900.0]])
    codes, scales = quantized_by_token(x, FP8, jnp.asarray([2.0, 2.0, 1.0]))
    np.testing.assert_array_equal(codes.astype(jnp.float32), [[0, 0], [0, 0], [3, -448]])
    assert [bool(jnp.isfinite(scale)) for scale in scales] == [False, False, True]
