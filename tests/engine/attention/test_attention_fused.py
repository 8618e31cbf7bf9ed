"""Our TPU kernel, interpreted on CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention import KVCacheSpec, RaggedBatch
from penstock.engine.attention.contract import PLAIN, CacheArray, first_key
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.attention.fused.layout import HeadLayout, tile_rows
from penstock.engine.errors import ConfigError
from penstock.engine.models import QKV, AttentionOptions, StackedCache
from tests.engine.attention.ragged_batches import PagedBatch, random_qkv, random_sinks, reference_attention
from tests.support.patience import slow

pytestmark = pytest.mark.versions

MAX_SEQS, MAX_LEN, LAYERS, LAYER = 6, 96, 2, 1
INTERPRETED = pltpu.InterpretParams(dma_execution_mode="eager")
MIXED = [(1, 33), (20, 45), (1, 2), (3, 3), (1, 16)]  # (tokens of this step, tokens in all) of each sequence


@cache
def fused(
    interpret: pltpu.InterpretParams, options: AttentionOptions = PLAIN, **values: Any
) -> Callable[..., tuple[jax.Array, StackedCache]]:
    """Returns the kernel with these values, compiled once for all tests of the same shapes."""
    attention = FusedAttention(interpret=interpret, **values)

    def attend(qkv: QKV, cache: StackedCache, batch: RaggedBatch, sinks: jax.Array | None = None) -> Any:
        return attention(qkv, cache, attention.prepare(batch, cache.pages.shape[2]), options=options, sinks=sinks)

    return jax.jit(attend)


def run(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 8,
    dtype: str = "float32",
    num_tokens: int = 32,
    max_keys: int = 16,
    seed: int = 0,
    has_sinks: bool = False,
    is_poisoned: bool = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns our and the reference's f32 values for the real tokens of one random batch; pages are compared here.

    `is_poisoned`: values are NaN in all rows but those of the tiles that the kernel has to read.
    """
    batch = PagedBatch.random(
        lengths, page_size=page_size, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=num_tokens, seed=seed
    )
    rng, num_real = np.random.default_rng(seed), batch.num_real
    q, k, v = random_qkv(rng, num_tokens, num_heads, num_kv_heads, head_dim, dtype)
    # Of K and V apart, f32, already of values that dtype has: [num_pages * page_size, 2, num_kv_heads, head_dim]
    before = np.array(stored(rng.normal(size=(batch.num_pages * page_size, 2, num_kv_heads, head_dim)), dtype))
    after, new = before.copy(), np.stack([k[:num_real], v[:num_real]], axis=1).astype(np.float32)
    after[batch.slots[:num_real]] = stored(new, dtype)
    expected = after.copy()
    if is_poisoned:
        unread = np.setdiff1d(np.arange(len(before)), read_slots(batch, tile_rows(dtype), **options))
        before[unread, 1] = np.nan
        expected[np.setdiff1d(unread, batch.slots[:num_real]), 1] = np.nan
    if "sliding_window" in options:
        before[:page_size, 0] = np.nan  # keys alone: no page holds a NaN among its values

    attend = fused(INTERPRETED, AttentionOptions(**options), max_blocks=2, max_queries=16, max_keys=max_keys)
    cache = cache_of(before, KVCacheSpec(LAYERS, batch.num_pages, page_size, num_kv_heads, head_dim, dtype))
    sinks = random_sinks(num_heads) if has_sinks else None
    step = batch.seen_through(options.get("sliding_window"))
    ours, new_cache = attend(QKV(*map(jnp.asarray, (q, k, v))), cache, step, sinks=sinks)
    check_pages(np.asarray(new_cache.pages, np.float32), before, expected, batch)

    reference = reference_attention(
        q,
        after.transpose(0, 2, 1, 3).reshape(batch.num_pages, page_size, -1, head_dim),
        *(batch.kv_lens, batch.page_indices, batch.cu_q_lens),
        len(lengths),
        **{"scale": head_dim**-0.5, **options},
        sinks=sinks,
    )
    return np.asarray(ours, np.float32)[:num_real], reference


def read_slots(batch: PagedBatch, tile: int, *, sliding_window: int | None = None, **_: Any) -> np.ndarray:
    """Returns the slots of the tiles that hold what the step's tokens see of earlier ones."""
    found = []
    for i, (q_len, kv_len) in enumerate(batch.lengths):
        first = first_key(kv_len - q_len, sliding_window) // tile * tile
        places = np.arange(first, -(-(kv_len - q_len) // tile) * tile)
        found.append(batch.page_indices[i, places // batch.page_size] * batch.page_size + places % batch.page_size)
    return np.concatenate(found)


def pages_shape(spec: KVCacheSpec) -> tuple[int, ...]:
    (pages,) = FusedAttention().cache_arrays(spec)
    assert isinstance(pages, CacheArray)
    return pages.shape


def cache_of(values: np.ndarray, spec: KVCacheSpec) -> StackedCache:
    """Returns pages of LAYER that hold `values`, behind those of another layer."""
    shape = pages_shape(spec)
    pages = np.full(shape, 3.0, np.float32)
    pages[LAYER * spec.num_pages :] = as_pages(values, shape, spec.head_dim)
    return StackedCache(jnp.asarray(pages, spec.dtype), jnp.int32(LAYER * spec.num_pages))


def check_pages(written: np.ndarray, before: np.ndarray, after: np.ndarray, batch: PagedBatch) -> None:
    """Checks that the tokens' slots hold what is in `after`, and that all else, the other layer too, is unchanged."""
    head_dim, first = before.shape[-1], LAYER * batch.num_pages
    expected, lanes = as_pages(after, written.shape, head_dim), lanes_of(head_dim)
    slots = batch.held()
    pages, places = slots // batch.page_size, slots % batch.page_size
    np.testing.assert_allclose(
        written[first + pages, :, places][..., lanes], expected[pages, :, places][..., lanes], rtol=1e-6
    )
    others = np.setdiff1d(np.arange(batch.num_pages), pages)
    np.testing.assert_array_equal(
        written[first + others][..., lanes], as_pages(before, written.shape, head_dim)[others][..., lanes]
    )
    np.testing.assert_array_equal(written[:first], 3.0)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values as f32, rounded to a page's type."""
    return np.asarray(jnp.asarray(values, jnp.float32).astype(dtype).astype(jnp.float32))


def as_pages(both: np.ndarray, shape: tuple[int, ...], head_dim: int) -> np.ndarray:
    """Lays [num_pages * page_size, 2, num_kv_heads, head_dim] out as our pages of one layer."""
    _, num_kv_heads, page_size, width = shape
    pages = np.zeros((len(both) // page_size, num_kv_heads, page_size, width), np.float32)
    split = both.reshape(-1, page_size, 2, num_kv_heads, head_dim).transpose(2, 0, 3, 1, 4)
    half = HeadLayout(head_dim).half
    pages[..., :head_dim], pages[..., half : half + head_dim] = split
    return pages


def lanes_of(head_dim: int) -> np.ndarray:
    half = HeadLayout(head_dim).half
    return np.concatenate([np.arange(head_dim), half + np.arange(head_dim)])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 2, 64), (6, 3, 96), slow(2, 2, 256), slow(5, 1, 128)],
)
def test_mixed_batches_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    ours, reference = run(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 90), (1, 8), (1, 9)], [(30, 90)]])
def test_pure_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    ours, reference = run(lengths)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


LAST_TILES = [(1, 33), (1, 41), (9, 62), (1, 1), (1, 80), (5, 5)]


@pytest.mark.parametrize(
    ("page_size", "options"),
    [(32, {}), (32, {"sliding_window": 20}), slow(24, {"sliding_window": 41}), slow(96, {})],
)
def test_only_tiles_that_hold_keys_are_read(page_size: int, options: dict[str, Any]) -> None:
    """Pages have four, three and twelve tiles, of which the first and the last are read in part."""
    ours, reference = run(LAST_TILES, page_size=page_size, max_keys=2 * page_size, is_poisoned=True, **options)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_rows_moved_are_those_of_whole_tiles() -> None:
    spec = KVCacheSpec(1, 4, 64, 2, 128, "bfloat16")
    moved = FusedAttention().rows_moved
    assert [moved(context, spec, 4) for context in (0, 1, 64, 65)] == [(0, 16), (16, 16), (64, 16), (80, 16)]
    assert moved(100, spec, 4, 20) == (112 - 80, 16)


@pytest.mark.parametrize(
    "options",
    [slow({"sliding_window": 1}), {"sliding_window": 24, "soft_cap": 2.0}, slow({"scale": 0.3})],
    ids=str,
)
def test_windows_caps_and_scales_equal_the_reference(options: dict[str, Any]) -> None:
    ours, reference = run(MIXED, **options)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "options"),
    [slow(4, 2, {}), slow(6, 3, {"head_dim": 96, "sliding_window": 24}), (5, 1, {"sliding_window": 1})],
)
def test_sinks_take_their_share_of_the_weights(num_heads: int, num_kv_heads: int, options: dict[str, Any]) -> None:
    ours, reference = run(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, has_sinks=True, **options)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_a_decoding_row_has_the_same_bits_alone_as_among_others() -> None:
    """Blocks of keys of several sequences are computed at once; these have one to six blocks."""
    lengths = [(1, 33), (1, 80), (1, 2), (1, 17), (1, 96), (1, 16)]
    batch = PagedBatch.random(lengths, page_size=8, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=32, seed=0)
    rng = np.random.default_rng(0)
    qkv = random_qkv(rng, 32, 4, 2, 64, "float32")
    held = stored(rng.normal(size=(batch.num_pages * 8, 2, 2, 64)), "float32")
    cache = cache_of(held, KVCacheSpec(LAYERS, batch.num_pages, 8, 2, 64, "float32"))
    attend = fused(INTERPRETED, max_keys=16, max_blocks=2, max_queries=16)
    among_others, _ = attend(QKV(*map(jnp.asarray, qkv)), cache, batch.seen_through(None))
    for i in (1, 4):
        arrays = (np.roll(array, -i, axis=0) for array in (*qkv, batch.slots, batch.kv_lens, batch.page_indices))
        q, k, v, slots, kv_lens, pages = map(jnp.asarray, arrays)
        step = RaggedBatch(slots, kv_lens, pages, jnp.minimum(batch.cu_q_lens, 1), jnp.asarray([1]))
        alone, _ = attend(QKV(q, k, v), cache, step)
        np.testing.assert_array_equal(alone[0], among_others[i])


@pytest.mark.parametrize(
    ("max_keys", "options"), [(512, {}), (256, {}), slow(512, {"sliding_window": 600, "soft_cap": 5.0})]
)
def test_a_prompts_bits_do_not_depend_on_how_it_is_cut(max_keys: int, options: dict[str, Any]) -> None:
    """Blocks have two parts, or one. The first tokens of a chunk see some of them whole, or all in part."""
    length, page_size, first = 1040, 128, 1020
    batch = PagedBatch.random(
        [(length - first, length)], page_size=page_size, max_seqs=1, max_len=length, num_tokens=32, seed=0
    )
    rng = np.random.default_rng(0)
    q, k, v = random_qkv(rng, 32, 4, 2, 64, "float32")
    held = stored(rng.normal(size=(batch.num_pages * page_size, 2, 2, 64)), "float32")
    attend = fused(INTERPRETED, AttentionOptions(**options), max_keys=max_keys, max_queries=16)

    def attended(ends: list[int]) -> np.ndarray:
        cache = cache_of(held, KVCacheSpec(LAYERS, batch.num_pages, page_size, 2, 64, "float32"))
        found, start = [], first
        for end in ends:
            moved = [np.roll(array, first - start, axis=0) for array in (q, k, v, batch.slots)]
            lens = jnp.asarray([0, end - start])
            step = RaggedBatch(
                jnp.asarray(moved[3]), jnp.asarray([end]), jnp.asarray(batch.page_indices), lens, jnp.asarray([1])
            )
            out, cache = attend(QKV(*map(jnp.asarray, moved[:3])), cache, step)
            found.append(np.asarray(out)[: end - start])
            start = end
        return np.concatenate(found)

    whole = attended([length])
    np.testing.assert_array_equal(attended([1024, length]), whole)
    np.testing.assert_array_equal(attended([1022, 1030, length]), whole)


def test_no_transfer_races_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)
    monkeypatch.setattr(f"{__name__}.INTERPRETED", checked)
    ours, reference = run(MIXED)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_bfloat16_is_as_close_as_its_precision() -> None:
    ours, reference = run(MIXED, dtype="bfloat16", head_dim=128, page_size=16)
    np.testing.assert_allclose(ours, reference, atol=3e-2)


@pytest.mark.parametrize("seed", [slow(0), 1])
def test_random_batches_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(1, MAX_LEN, rng.integers(1, MAX_SEQS + 1))
    lengths = [(int(min(rng.integers(1, 20), kv_len)) if rng.random() < 0.5 else 1, int(kv_len)) for kv_len in kv_lens]
    options: dict[str, Any] = {"sliding_window": 20} if seed == 1 else {}
    ours, reference = run(lengths, num_tokens=128, max_keys=[16, 32][seed], seed=seed, **options)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_a_page_that_is_not_made_of_whole_tiles_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size 24 is not a multiple of 16"):
        FusedAttention().cache_arrays(KVCacheSpec(1, 2, 24, 1, 64, "bfloat16"))


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_sequence_whose_tokens_go_to_the_sink_leaves_its_pages_alone(num_queries: int) -> None:
    shape = pages_shape(KVCacheSpec(1, 3, 8, 1, 64, "float32"))
    x = jnp.ones((16, 1, 64))
    batch = RaggedBatch(
        slots=jnp.zeros(16, jnp.int32),
        kv_lens=jnp.asarray([num_queries, 0]),
        page_indices=jnp.asarray([[1, 2], [0, 0]]),
        cu_q_lens=jnp.asarray([0, num_queries, num_queries]),
        num_seqs=jnp.asarray([1]),
    )
    out, cache = fused(INTERPRETED)(QKV(x, x, x), StackedCache(jnp.full(shape, 3.0), jnp.int32(0)), batch)
    np.testing.assert_array_equal(cache.pages[1:], 3.0)
    assert np.isfinite(out[:num_queries]).all()


def test_a_nan_spoils_its_own_sequence_and_no_other_of_its_block() -> None:
    """Two prompts share a block of queries; the first one's second key is broken."""
    shape = pages_shape(KVCacheSpec(1, 3, 8, 1, 64, "float32"))
    x = jnp.ones((16, 1, 64)).at[1].set(jnp.nan)
    batch = RaggedBatch(
        slots=jnp.asarray([8, 9, 10, 16, 17, *[0] * 11], jnp.int32),
        kv_lens=jnp.asarray([3, 2]),
        page_indices=jnp.asarray([[1, 0], [2, 0]]),
        cu_q_lens=jnp.asarray([0, 3, 5]),
        num_seqs=jnp.asarray([2]),
    )
    out, cache = fused(INTERPRETED)(QKV(x, x, x), StackedCache(jnp.zeros(shape), jnp.int32(0)), batch)
    assert np.isnan(out[1:3]).all()
    np.testing.assert_allclose(out[3:5], 1.0)
    assert np.isfinite(cache.pages[2]).all()
