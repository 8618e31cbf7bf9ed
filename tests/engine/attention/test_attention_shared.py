"""A layer that reads another's keys and values attends as that layer does, and leaves its pages unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.attention import KVCacheSpec, attention_for
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.models import QKV, AttentionOptions, StackedCache
from tests.engine.attention.ragged_batches import (
    IMPLEMENTATIONS,
    MIXED,
    QUANTIZED,
    RAGGED,
    TRITON,
    PagedBatch,
    implementation,
    random_qkv,
)
from tests.engine.attention.ragged_batches import run_attention as attended
from tests.support.patience import slow

MAX_SEQS, MAX_LEN = 6, 96


def random_step(head_dim: int, page_size: int, heads: tuple[int, int] = (4, 2)) -> tuple[QKV, PagedBatch]:
    lengths = RAGGED[MIXED]
    batch = PagedBatch.random(lengths, page_size=page_size, max_seqs=MAX_SEQS, max_len=MAX_LEN, num_tokens=32, seed=3)
    return QKV(*map(jnp.asarray, random_qkv(np.random.default_rng(3), 32, *heads, head_dim, "float32"))), batch


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, *QUANTIZED, slow(TRITON)])
def test_pages_that_have_the_step_are_read_as_if_it_were_written(name: str, window: int | None) -> None:
    qkv, batch = random_step(head_dim=24, page_size=8)
    dtype = implementation(name).cache_dtype("float32")
    (pages,) = implementation(name).init_cache(KVCacheSpec(1, batch.num_pages, 8, 2, 24, dtype))
    options, step = AttentionOptions(sliding_window=window, scale=1.0), batch.seen_through(window)
    expected, pages = attended(name, qkv, pages, step, options)
    before = [np.array(array) for array in pages]
    found, pages = attended(name, QKV(qkv.q, None, None), pages, step, options)
    num_real = batch.num_real
    np.testing.assert_array_equal(np.asarray(found)[:num_real], np.asarray(expected)[:num_real])
    for array, was in zip(pages, before, strict=True):
        np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_dtype", "window"),
    [slow(512, (4, 1), None, None), (24, (4, 2), None, 5), slow(512, (4, 2), None, 5), slow(64, (4, 2), "int8", None)],
)
def test_our_tpu_kernel_reads_them_too(
    head_dim: int, heads: tuple[int, int], kv_dtype: str | None, window: int | None
) -> None:
    page_size = 128 if kv_dtype else 8
    qkv, batch = random_step(head_dim, page_size, heads)
    attention = FusedAttention(
        interpret=pltpu.InterpretParams(dma_execution_mode="eager"),
        kv_dtype=kv_dtype,
        max_blocks=2,
        max_queries=16,
        max_keys=16,
    )
    options, step = AttentionOptions(sliding_window=window, scale=1.0), batch.seen_through(window)
    spec = KVCacheSpec(2, batch.num_pages, page_size, heads[1], head_dim, attention.cache_dtype("float32"))
    (pages,) = attention.init_cache(spec)

    @jax.jit
    def attend(qkv: QKV, pages: Any) -> Any:
        cache = StackedCache(pages, jnp.int32(batch.num_pages))
        out, cache = attention(qkv, cache, attention.prepare(step, page_size), options=options)
        return out, cache.pages

    expected, pages = attend(qkv, pages)
    before = jax.tree.map(np.array, pages)
    found, pages = attend(QKV(qkv.q, None, None), pages)
    # Blocks of keys may be put together otherwise where some of them are not new.
    np.testing.assert_allclose(found[: batch.num_real], expected[: batch.num_real], rtol=1e-6, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, pages), before)


def test_the_kernel_that_ships_in_jax_is_refused_for_them() -> None:
    with pytest.raises(ConfigError, match="'ragged' has no layers that read the keys and values of others"):
        attention_for("ragged", "tpu", "bfloat16", NativeLibrary(Path()), shares_kv=True)
