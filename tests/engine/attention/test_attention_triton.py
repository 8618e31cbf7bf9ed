"""The GPU kernels, interpreted on CPU, against the reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.attention import KVCacheSpec, RaggedBatch
from penstock.engine.attention.triton import TritonAttention
from penstock.engine.attention.triton.decode import split_work
from penstock.engine.attention.triton.tiles import Heads, decode_tiles, prefill_tiles
from penstock.engine.deployment import deployment
from penstock.engine.models import QKV
from tests.engine.attention import ragged_batches
from tests.engine.attention.ragged_batches import MIXED, RAGGED, TRITON
from tests.engine.engines import SMALL, VOCAB_SIZE, drive
from tests.support.patience import mostly_slow, slow

pytestmark = pytest.mark.versions

compare = partial(ragged_batches.compare, names=(TRITON,))
LONG = [(1, 150), (70, 140), (1, 64), (1, 129), (33, 33)]  # each over several blocks of keys


@pytest.mark.parametrize("lengths", mostly_slow(RAGGED, MIXED, "more queries than a block holds", "decode only"))
def test_ragged_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    compare(lengths)


@pytest.mark.parametrize("page_size", [slow(8), 12, slow(64)])
def test_pages_smaller_and_larger_than_a_block_of_keys_equal_the_reference(page_size: int) -> None:
    compare(LONG, page_size=page_size)


@pytest.mark.parametrize("options", [slow({"sliding_window": 1}), {"sliding_window": 70}, {"soft_cap": 2.0}], ids=str)
def test_windows_and_caps_equal_the_reference(options: dict[str, Any]) -> None:
    compare(LONG, **options)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "options"),
    [slow(4, 2, {}), (5, 1, {"sliding_window": 70}), slow(6, 3, {"sliding_window": 1}), (34, 2, {"page_size": 12})],
)
def test_sinks_take_their_share_of_the_weights_once(num_heads: int, num_kv_heads: int, options: dict[str, Any]) -> None:
    compare(LONG, num_heads=num_heads, num_kv_heads=num_kv_heads, has_sinks=True, **options)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [slow(5, 1, 64), (6, 3, 96), slow(34, 2, 16), slow(2, 2, 256)]
)
def test_any_group_and_head_dim_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compare(RAGGED[MIXED], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 3e-2), slow("float16", 4e-3)])
def test_half_precision_is_as_close_as_it_can_be(dtype: str, atol: float) -> None:
    compare(RAGGED[MIXED], dtype=dtype, atol=atol)


@pytest.mark.parametrize("num_programs", [1, 7, 40])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("seed", range(4))
def test_every_block_of_keys_is_in_one_share_and_shares_are_even(
    num_programs: int, window: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    heads, max_seqs = Heads(8, 2, 64), 6
    tiles = decode_tiles(heads, "float32", num_programs, max_seqs, max_len=4096)
    num_seqs = int(rng.integers(0, max_seqs + 1))
    q_lens, kv_lens = np.zeros(max_seqs, np.int32), np.zeros(max_seqs, np.int32)
    q_lens[:num_seqs] = rng.choice([1, 1, 5], num_seqs)
    kv_lens[:num_seqs] = rng.integers(5, [60, 4096, 4096, 300][seed], num_seqs)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    batch = RaggedBatch(*map(jnp.asarray, (np.zeros(32), kv_lens, np.zeros((max_seqs, 1)), cu_q_lens, [num_seqs])))
    work, shares = (np.asarray(array) for array in split_work(batch, tiles, heads, window))

    taken: list[tuple[int, int]] = []
    for seq, which in shares:
        if seq >= 0:
            _, first, count, share, _ = work[seq]
            taken += [(seq, block) for block in range(which * share, min((which + 1) * share, count))]
            assert which * share < count
            assert first * tiles.keys <= max(0, kv_lens[seq] - (window or 10**6)) < (first + 1) * tiles.keys
    decoding = [i for i in range(num_seqs) if q_lens[i] == 1]
    begins = np.array([0 if window is None else max(0, int(kv_len) - window) // tiles.keys for kv_len in kv_lens])
    assert taken == [(i, block) for i in decoding for block in range(-(-kv_lens[i] // tiles.keys) - begins[i])]
    most = max((work[i][3] for i in decoding), default=1)
    assert most <= max(1, -(-len(taken) * heads.num_kv_heads // num_programs))
    used = np.bincount(shares[shares[:, 0] >= 0, 0], minlength=max_seqs)
    assert np.max(used) <= tiles.max_splits
    np.testing.assert_array_equal(work[decoding, 4], [used[:i].sum() for i in decoding])


@pytest.mark.parametrize(("num_tokens", "max_seqs"), [(16, 16), (64, 8), (128, 64)])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_the_grid_has_room_for_every_block_of_queries(num_tokens: int, max_seqs: int, group: int) -> None:
    tiles = prefill_tiles(Heads(group, 1, 128), "bfloat16", num_tokens, max_seqs)
    for q_len in range(2, num_tokens + 1):
        q_lens = [q_len] * min(max_seqs, num_tokens // q_len)
        assert sum(-(-length // tiles.queries) for length in q_lens) <= tiles.num_blocks
    assert tiles.queries * group <= tiles.rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_blocks_keep_to_shared_memory(head_dim: int, dtype: str) -> None:
    heads = Heads(32, 8, head_dim)
    token_bytes = 2 * heads.width * jnp.dtype(dtype).itemsize
    decoding = decode_tiles(heads, dtype, 264, 64, 4096)
    prefilling = prefill_tiles(heads, dtype, 2048, 64)
    assert 2 * (2 * decoding.keys * token_bytes) < 227 * 1024  # two programs, with two blocks each
    q_bytes = prefilling.rows * heads.width * jnp.dtype(dtype).itemsize
    assert q_bytes + 3 * prefilling.keys * token_bytes < 227 * 1024


def test_a_sequence_whose_tokens_go_to_the_sink_leaves_its_pages_alone() -> None:
    attention = TritonAttention(num_programs=4, interpret=True)
    spec = KVCacheSpec(1, 3, 8, 1, 16, "float32")
    pages = tuple(jnp.full(array.shape, 3.0) for array in attention.cache_arrays(spec)[0])
    x = jnp.ones((16, 1, 16))
    batch = RaggedBatch(
        slots=jnp.zeros(16, jnp.int32),
        kv_lens=jnp.asarray([1, 3]),
        page_indices=jnp.asarray([[1], [2]]),
        cu_q_lens=jnp.asarray([0, 1, 4]),
        num_seqs=jnp.asarray([2]),
    )
    out, written = jax.jit(attention)(QKV(x, x, x), pages, batch)
    for array in written:
        np.testing.assert_array_equal(array[1:], 3.0)
    assert np.isfinite(out[:4]).all()


def test_an_engine_gives_the_tokens_of_the_native_form(
    engine: Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [tuple(map(int, rng.integers(0, VOCAB_SIZE, length))) for length in (1, 9, 20, 33)]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    expected = drive(engine, requests)
    interpreted = TritonAttention(num_programs=4, interpret=True)
    monkeypatch.setattr(deployment, "attention_for", lambda *_, **__: interpreted)
    found = drive(Engine.from_checkpoint(tiny_model, SMALL), requests)
    assert {key: result.token_ids for key, result in found.items()} == {
        key: result.token_ids for key, result in expected.items()
    }
