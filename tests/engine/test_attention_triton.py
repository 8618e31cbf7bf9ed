"""The GPU kernels, interpreted on CPU, against the reference that JAX publishes with its own for TPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ragged_batches
from ragged_batches import MIXED, RAGGED, TRITON

from engine.attention import RaggedBatch
from engine.attention.triton import decode, tiles
from engine.attention.triton.decode import split_work
from engine.attention.triton.tiles import DecodeTiles, Heads, decode_tiles, prefill_tiles

compare = partial(ragged_batches.compare, names=(TRITON,))
LONG = [(1, 150), (70, 140), (1, 64), (1, 129), (33, 33)]  # each over several blocks of keys


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_batches_equal_the_reference(lengths: list[tuple[int, int]]) -> None:
    compare(lengths)


@pytest.mark.parametrize("page_size", [8, 12, 64])
def test_pages_smaller_and_larger_than_a_block_of_keys_equal_the_reference(page_size: int) -> None:
    compare(LONG, page_size=page_size)


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 70}, {"soft_cap": 2.0}], ids=str)
def test_windows_and_caps_equal_the_reference(options: dict[str, Any]) -> None:
    compare(LONG, **options)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 64), (6, 3, 96), (34, 2, 16), (2, 2, 256)])
def test_any_group_and_head_dim_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compare(RAGGED[MIXED], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_half_precision_is_as_close_as_it_can_be(dtype: str, atol: float) -> None:
    compare(RAGGED[MIXED], dtype=dtype, atol=atol)
