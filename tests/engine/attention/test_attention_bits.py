"""A row depends on its own sequence alone, to the bit.

How its prompt was cut, the company in its step, and the tasks that the C++ kernel makes of it change nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.attention import KVCacheSpec
from penstock.engine.models import QKV, AttentionOptions, LayerCache
from tests.engine.attention.ragged_batches import IMPLEMENTATIONS, PagedBatch, implementation, run_attention

LENGTH, MAX_LEN, HEADS, HEAD_DIM, PAGE_SIZE = 2100, 2112, 4, 16, 32

pytestmark = pytest.mark.skipif("native" not in IMPLEMENTATIONS, reason="there is no C++ compiler")


def attended(
    name: str, dtype: str, first: int, end: int, neighbours: list[tuple[int, int]], options: AttentionOptions
) -> np.ndarray:
    """Returns the attention of tokens [first, end) of a sequence: one chunk behind earlier tokens, in a step with
    neighbours.
    """
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(LENGTH, heads, HEAD_DIM)), dtype) for heads in (HEADS, 1, 1))
    lengths = [*neighbours, (end - first, end)]
    num_tokens = sum(q_len for q_len, _ in lengths)
    batch = PagedBatch.random(lengths, page_size=PAGE_SIZE, max_seqs=3, max_len=MAX_LEN, num_tokens=num_tokens, seed=1)
    held_as = implementation(name).cache_dtype(dtype)
    spec = KVCacheSpec(1, batch.num_pages, PAGE_SIZE, 1, HEAD_DIM, held_as)
    whole = PagedBatch(
        [(end, end)],
        PAGE_SIZE,
        batch.slots_of(len(neighbours)),
        np.array([end], np.int32),
        batch.page_indices[len(neighbours) :][:1],
        np.array([0, end], np.int32),
    )
    cache: LayerCache = implementation(name).init_cache(spec)[0]
    _, cache = run_attention(name, QKV(q[:end], k[:end], v[:end]), cache, whole.seen_through(None), options)
    others = [jnp.asarray(rng.normal(size=(num_tokens - (end - first), n, HEAD_DIM)), dtype) for n in (HEADS, 1, 1)]
    step = QKV(*(jnp.concatenate([other, x[first:end]]) for other, x in zip(others, (q, k, v), strict=True)))
    out, _ = run_attention(name, step, cache, batch.seen_through(None), options)
    return np.asarray(out, np.float32)[num_tokens - (end - first) :]


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("native", "float32", AttentionOptions()),
        ("native", "bfloat16", AttentionOptions(sliding_window=1500)),
        ("native", "float16", AttentionOptions(sliding_window=1500)),
        ("native int8", "float32", AttentionOptions(sliding_window=70)),
        ("native int8", "float16", AttentionOptions()),
    ],
    ids=str,
)
def test_rows_are_the_same_however_they_come(name: str, dtype: str, options: AttentionOptions) -> None:
    """Rows come as a long chunk, as a few queries whose parts are tasks, and alone beside others."""
    chunk = attended(name, dtype, LENGTH - 60, LENGTH, [], options)
    few = attended(name, dtype, LENGTH - 3, LENGTH, [(1, 40)], options)
    one = attended(name, dtype, LENGTH - 1, LENGTH, [(5, 9), (1, 300)], options)
    np.testing.assert_array_equal(few, chunk[-3:])
    np.testing.assert_array_equal(one, chunk[-1:])
    assert np.isfinite(chunk).all()
