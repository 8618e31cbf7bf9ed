"""Our TPU kernel with 8-bit pages, interpreted on CPU, against the XLA form with the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention import KVCacheSpec, RaggedBatch, ShardedAttention
from penstock.engine.attention.contract import PLAIN
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.attention.fused.layout import HeadLayout
from penstock.engine.attention.quantization import kv_head_bytes
from penstock.engine.errors import ConfigError
from penstock.engine.models import QKV, AttentionOptions, LayerCache, StackedCache
from penstock.engine.models.attention_interface import KVScales
from penstock.engine.sharding.placement import place
from tests.engine.attention.ragged_batches import FP8, PagedBatch, random_qkv, random_sinks, run_attention
from tests.support.patience import slow

INT8 = "int8"
PAGE, MAX_SEQS, MAX_LEN, NUM_TOKENS, LAYERS = 128, 6, 384, 64, 2
EAGER = pltpu.InterpretParams(dma_execution_mode="eager")
# (tokens of this step, tokens in all): contexts that end at a page's first and last lane, in a tile and around one
MIXED = [(1, 129), (20, 140), (1, 33), (3, 3), (1, 128), (11, 300)]


@cache
def fused(
    interpret: pltpu.InterpretParams, options: AttentionOptions, max_keys: int, kv_dtype: str = INT8
) -> Callable[..., Any]:
    """Returns the kernel, compiled once for all tests of the same shapes."""
    attention = FusedAttention(kv_dtype=kv_dtype, max_keys=max_keys, max_blocks=2, max_queries=16, interpret=interpret)

    def attend(
        qkv: QKV,
        cache: StackedCache,
        batch: RaggedBatch,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> Any:
        prepared = attention.prepare(batch, PAGE)
        return attention(qkv, cache, prepared, options=options, sinks=sinks, kv_scales=kv_scales)

    return jax.jit(attend)


def random_pages(
    rng: np.random.Generator, num_pages: int, num_kv_heads: int, head_dim: int, kv_dtype: str = INT8
) -> LayerCache:
    """Returns pages as the XLA form has them: any codes, and scales of all sizes."""
    shape = (num_pages, num_kv_heads, PAGE)
    codes: np.ndarray = rng.integers(-127, 128, (2, *shape, head_dim)).astype(np.int8)
    scales: np.ndarray = np.exp(rng.uniform(np.log(1e-4), np.log(0.05), (2, *shape))).astype(np.float32)
    if kv_dtype == FP8:
        codes, scales = np.where(codes == -1, 0, codes).view(jnp.dtype(FP8)), scales / 3  # -1 and 127 are NaN
        codes[np.isnan(codes)] = 0
    return tuple(map(jnp.asarray, (codes[0].swapaxes(2, 3), codes[1], *scales)))


def as_ours(pages: LayerCache, layer: int) -> StackedCache:
    """Lays pages out in our way, as one of LAYERS; the other layers hold 3."""
    keys, values, key_scales, value_scales = map(np.asarray, pages)
    num_pages, num_kv_heads, head_dim, _ = keys.shape
    layout = HeadLayout(head_dim)
    codes = np.full((LAYERS, num_pages, num_kv_heads, PAGE, layout.width), 3, keys.dtype)
    codes[layer] = 0
    codes[layer, ..., :head_dim] = keys.swapaxes(2, 3)
    codes[layer, ..., layout.half : layout.half + head_dim] = values
    scales = np.full((LAYERS, num_pages, num_kv_heads, 2, PAGE), 3, np.float32)
    scales[layer] = np.stack([key_scales, value_scales], axis=2)
    flat = (jnp.asarray(array.reshape(-1, *array.shape[2:])) for array in (codes, scales))
    return StackedCache(tuple(flat), jnp.int32(layer * num_pages))


def check_pages(ours: StackedCache, expected: LayerCache, batch: PagedBatch, layer: int) -> None:
    """Checks that the tokens' slots are equal to the bit, and that other sequences' pages and other layers are
    unchanged.
    """
    wanted = as_ours(expected, layer)
    slots = batch.held()
    pages, places = int(wanted.first_page) + slots // PAGE, slots % PAGE
    (codes, scales), (wanted_codes, wanted_scales) = (tuple(map(np.asarray, held.pages)) for held in (ours, wanted))
    np.testing.assert_array_equal(codes[pages, :, places], wanted_codes[pages, :, places])
    np.testing.assert_array_equal(scales[pages, :, :, places], wanted_scales[pages, :, :, places])
    # Page 0 takes what padding writes in the XLA form, and nothing in ours.
    others = np.setdiff1d(np.arange(len(codes)), [*pages, int(wanted.first_page)])
    np.testing.assert_array_equal(codes[others], wanted_codes[others])
    np.testing.assert_array_equal(scales[others], wanted_scales[others])


def random_batch(lengths: list[tuple[int, int]], seed: int = 0) -> PagedBatch:
    return PagedBatch.random(
        lengths, page_size=PAGE, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=NUM_TOKENS, seed=seed
    )


def compare(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (4, 2, 64),  # heads, KV heads, head_dim
    dtype: str = "float32",
    kv_dtype: str = INT8,
    kv_scales: tuple[list[float], list[float]] | None = None,
    max_keys: int = PAGE,
    seed: int = 0,
    has_sinks: bool = False,
    interpret: pltpu.InterpretParams = EAGER,
    atol: float = 2e-5,
    **options: Any,
) -> None:
    """Compares attention and pages of the kernel with the XLA form."""
    rng, batch = np.random.default_rng(seed), random_batch(lengths, seed)
    q, k, v = random_qkv(rng, NUM_TOKENS, *heads, dtype)
    k, v = (x * rng.uniform(0.05, 2, (NUM_TOKENS, heads[1], 1)).astype(dtype) for x in (k, v))  # all sizes
    sinks = random_sinks(heads[0]) if has_sinks else None
    before = random_pages(rng, batch.num_pages, *heads[1:], kv_dtype)
    ours, step = as_ours(before, LAYERS - 1), batch.seen_through(options.get("sliding_window"))
    qkv = QKV(*map(jnp.asarray, (q, k, v)))
    static = None if kv_scales is None else KVScales(*(jnp.asarray(scales, jnp.float32) for scales in kv_scales))
    out, ours = fused(interpret, AttentionOptions(**options), max_keys, kv_dtype)(qkv, ours, step, sinks, static)
    expected, after = run_attention(f"xla {kv_dtype}", qkv, before, step, AttentionOptions(**options), sinks, static)
    found, wanted = (np.asarray(x, np.float32)[: batch.num_real] for x in (out, expected))
    np.testing.assert_allclose(found, wanted, atol=atol)
    check_pages(ours, after, batch, LAYERS - 1)


@pytest.mark.parametrize(
    ("heads", "kv_dtype"),
    [
        ((4, 2, 64), INT8),
        slow((6, 3, 96), INT8),
        slow((5, 1, 128), INT8),
        slow((2, 2, 256), INT8),
        slow((4, 2, 64), FP8),
        slow((6, 3, 96), FP8),  # always run with late transfers, below
        slow((5, 1, 128), FP8),
    ],
    ids=str,
)
def test_mixed_batches_equal_the_xla_form(heads: tuple[int, int, int], kv_dtype: str) -> None:
    compare(MIXED, heads=heads, kv_dtype=kv_dtype)


@pytest.mark.parametrize("max_keys", [slow(128), 256])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 150, "soft_cap": 2.0, "has_sinks": True},
        slow({"has_sinks": True, "scale": 0.3}),
        slow({"kv_dtype": FP8, "sliding_window": 150, "soft_cap": 2.0, "has_sinks": True}),
        slow({"kv_dtype": FP8, "sliding_window": 1}),
    ],
    ids=str,
)
def test_windows_caps_and_sinks_equal_the_xla_form(options: dict[str, Any], max_keys: int) -> None:
    compare(MIXED, max_keys=max_keys, **options)


@pytest.mark.parametrize(
    "options", [{"sliding_window": 150, "soft_cap": 2.0, "has_sinks": True}, slow({"heads": (6, 3, 96)})], ids=str
)
def test_scales_that_are_given_take_the_place_of_the_tokens_own(options: dict[str, Any]) -> None:
    """The scales are not powers of two, differ by head, and are so small that some keys and values are clipped."""
    num_kv_heads = options.get("heads", (4, 2))[1]
    scales = ([0.0017, 0.0031, 0.0007][:num_kv_heads], [0.0053, 0.0011, 0.0029][:num_kv_heads])
    compare(MIXED, kv_dtype=FP8, kv_scales=scales, max_keys=256, **options)


@pytest.mark.parametrize("seed", [slow(0), 1, slow(2), slow(3)])
def test_random_batches_equal_the_xla_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(1, MAX_LEN + 1, rng.integers(2, MAX_SEQS + 1))
    lengths = [(int(min(rng.integers(2, 12), n)) if rng.random() < 0.5 else 1, int(n)) for n in kv_lens]
    compare(lengths, seed=seed, max_keys=[256, 128, 384, 256][seed])


@pytest.mark.parametrize("kv_dtype", [INT8, slow(FP8)])
def test_bfloat16_is_as_close_as_its_precision(kv_dtype: str) -> None:
    compare(MIXED, heads=(4, 2, 128), dtype="bfloat16", kv_dtype=kv_dtype, atol=3e-2)


@pytest.mark.parametrize("kv_dtype", [INT8, slow(FP8)])
def test_pages_are_updated_in_place_over_many_steps(kv_dtype: str) -> None:
    """A prompt runs in two chunks beside a decoding sequence, then both decode past the end of a page."""
    heads, rng = (4, 2, 64), np.random.default_rng(3)
    whole = random_batch([(1, 140), (1, 160)])
    random = random_pages(rng, whole.num_pages, *heads[1:], kv_dtype)
    theirs: LayerCache = tuple(jnp.zeros_like(array) for array in random)
    ours = as_ours(theirs, 0)
    lengths = [[(40, 40)], [(40, 80), (7, 7)], [(40, 120), (1, 8)], *([(1, 121 + i), (1, 9 + i)] for i in range(12))]
    for i, seen in enumerate(lengths):
        batch = PagedBatch.random(
            seen, page_size=PAGE, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=NUM_TOKENS, seed=0
        )
        table = np.where(np.arange(MAX_SEQS)[:, None] < 2, whole.page_indices, 0)
        batch = replaced_table(batch, table)
        qkv = QKV(*map(jnp.asarray, random_qkv(rng, NUM_TOKENS, *heads, "float32")))
        step = batch.seen_through(None)
        out, ours = fused(EAGER, PLAIN, PAGE, kv_dtype)(qkv, ours, step)
        expected, theirs = run_attention(f"xla {kv_dtype}", qkv, theirs, step)
        np.testing.assert_allclose(out[: batch.num_real], expected[: batch.num_real], atol=2e-5, err_msg=str(i))
        check_pages(ours, theirs, batch, 0)


def replaced_table(batch: PagedBatch, table: np.ndarray) -> PagedBatch:
    """Returns the same step with its sequences in other pages."""
    slots = batch.slots.copy()
    moved = PagedBatch(batch.lengths, PAGE, slots, batch.kv_lens, table, batch.cu_q_lens)
    for i, (q_len, kv_len) in enumerate(batch.lengths):
        slots[batch.cu_q_lens[i] : batch.cu_q_lens[i + 1]] = moved.slots_of(i)[kv_len - q_len :]
    return moved


def test_fp8_equals_the_xla_form_and_no_transfer_races_with_another() -> None:
    """A transfer happens as late as it may: when it is waited for."""
    late = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)
    compare(MIXED, heads=(6, 3, 96), kv_dtype=FP8, interpret=late)
    assert interpreter.races is not None
    assert not interpreter.races.races_found


def test_what_cannot_be_scaled_is_zero_or_spoils_its_own_sequence() -> None:
    """Two prompts share a block of queries; an infinite value and an infinite key are the first one's."""
    batch, num_kv_heads, head_dim = random_batch([(4, 4), (3, 3), (1, 1)]), 2, 64
    q = jnp.ones((NUM_TOKENS, 4, head_dim))
    k = jnp.ones((NUM_TOKENS, num_kv_heads, head_dim)).at[3, :, 0].set(jnp.inf)
    v = jnp.ones((NUM_TOKENS, num_kv_heads, head_dim)).at[0].set(jnp.inf)
    pages = random_pages(np.random.default_rng(0), batch.num_pages, num_kv_heads, head_dim)
    out, ours = fused(EAGER, PLAIN, PAGE)(QKV(q, k, v), as_ours(pages, 0), batch.seen_through(None))
    assert jnp.isnan(out[3]).all()
    np.testing.assert_allclose(out[4:8], 1.0, rtol=1e-5)
    assert jnp.isfinite(ours.pages[1][:, :, 1]).all()


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_what_is_moved_and_held_counts_the_scales(kv_dtype: str) -> None:
    attention, spec = FusedAttention(kv_dtype=kv_dtype), KVCacheSpec(2, 7, PAGE, 3, 128, kv_dtype)
    (pages,) = attention.cache_arrays(spec)
    assert isinstance(pages, tuple)
    codes, scales = pages
    assert codes.num_bytes + scales.num_bytes == 2 * 7 * PAGE * 3 * 2 * kv_head_bytes(128, kv_dtype)
    assert (scales.shape, scales.dtype, scales.axes[1]) == ((14, 3, 2, PAGE), "float32", "kv_heads")
    # A row is 264 bytes; the scales of 96 tokens more than are in a tile are 768.
    assert attention.rows_moved(100, spec, 4) == (128, 32 + 3)
    assert attention.rows_moved(130, spec, 4) == (160 + 3, 32 + 3)
    assert attention.rows_moved(130, spec, 4, 2) == (160 - 128 + 3, 32 + 3)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_pages_that_are_no_multiple_of_the_lanes_are_refused(kv_dtype: str) -> None:
    with pytest.raises(
        ConfigError, match=f"page_size 64 is not a multiple of 128, the lanes .* scales of {kv_dtype} lie"
    ):
        FusedAttention(kv_dtype=kv_dtype).cache_arrays(KVCacheSpec(1, 2, 64, 1, 64, kv_dtype))


@pytest.mark.parametrize("kv_dtype", [slow(INT8), FP8])
def test_a_mesh_is_given_codes_and_scales_by_their_heads(kv_dtype: str) -> None:
    """The mesh has one device, as more are not interpreted; for four devices the plan compiles."""
    kv_scales = KVScales(jnp.array([0.0017, 0.0031]), jnp.array([0.0053, 0.0011])) if kv_dtype == FP8 else None
    inner = FusedAttention(kv_dtype=kv_dtype, max_keys=PAGE, max_blocks=2, max_queries=16, interpret=EAGER)
    attention = ShardedAttention(inner, place(jax.devices()[:1], 1))
    batch, heads = random_batch(MIXED), (4, 2, 64)
    rng = np.random.default_rng(0)
    (cache_arrays,) = attention.init_cache(KVCacheSpec(LAYERS, batch.num_pages, PAGE, *heads[1:], kv_dtype))
    pages = random_pages(rng, batch.num_pages, *heads[1:], kv_dtype)
    held = as_ours(pages, 1)
    assert [array.shape for array in cache_arrays] == [array.shape for array in held.pages]
    qkv, step = QKV(*map(jnp.asarray, random_qkv(rng, NUM_TOKENS, *heads, "float32"))), batch.seen_through(None)
    attend = jax.jit(partial(attention, options=PLAIN))
    out, ours = attend(qkv, held, attention.prepare(step, PAGE), kv_scales=kv_scales)
    expected, theirs = run_attention(f"xla {kv_dtype}", qkv, pages, step, kv_scales=kv_scales)
    np.testing.assert_allclose(out[: batch.num_real], expected[: batch.num_real], atol=2e-5)
    check_pages(ours, theirs, batch, 1)
