"""Blocks of GGUF tensors, compared with the dequantization of the `gguf` library."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.gguf_blocks import BLOCK_TYPES, BlockType
from penstock.engine.formats.packing import leaf_shapes
from penstock.engine.models.layers.quantized import unpacked

NUM_OUT, NUM_BLOCKS = 3, 4


def random_rows(name: str, rng: np.random.Generator) -> np.ndarray:
    """Returns bytes of rows, all random but for the floats."""
    form = BLOCK_TYPES[name]
    rows = rng.integers(0, 256, (NUM_OUT, NUM_BLOCKS, form.num_bytes), np.uint8)
    floats = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "MXFP4": ()}.get(name, (0, 2))
    for place in floats:
        scales = rng.normal(0, 0.1, (NUM_OUT, NUM_BLOCKS, 1)).astype(np.float16)
        rows[..., place : place + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        rows[..., 0] = rng.integers(64, 192, rows.shape[:-1], np.uint8)  # exponents of two: 255 is not a number
    return rows.reshape(NUM_OUT, -1)


def read(name: str, rows: np.ndarray, index: tuple[slice, slice]) -> dict[str, np.ndarray]:
    """Reads a part of the weight, by the features of its codes."""
    form = BLOCK_TYPES[name]
    num_in = NUM_BLOCKS * form.features
    leaves = form.leaves(name, NUM_OUT, num_in)
    found = {}
    for leaf, (shape, kind) in leaf_shapes(form.packing, NUM_OUT, num_in).items():
        start, stop, _ = index[1].indices(num_in)
        part = slice(start * shape[1] // num_in, stop * shape[1] // num_in)
        found[leaf] = leaves[leaf].read(lambda at: rows[at], shape, (index[0], part))
        assert found[leaf].dtype == np.dtype(kind)
    return found


def as_f32(form: BlockType, leaves: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(unpacked(form.packing, {name: jnp.asarray(leaf) for name, leaf in leaves.items()}))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_value_is_that_of_the_gguf_library(name: str) -> None:
    rows = random_rows(name, np.random.default_rng(0))
    expected = dequantize(rows, GGMLQuantizationType[name])
    np.testing.assert_array_equal(as_f32(BLOCK_TYPES[name], read(name, rows, (slice(None), slice(None)))), expected)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_part_is_read_as_the_whole_is(name: str) -> None:
    rows = random_rows(name, np.random.default_rng(1))
    expected = dequantize(rows, GGMLQuantizationType[name])
    half = expected.shape[1] // 2
    found = as_f32(BLOCK_TYPES[name], read(name, rows, (slice(1, 3), slice(half, None))))
    np.testing.assert_array_equal(found, expected[1:3, half:])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_scale_that_is_not_finite_is_refused(name: str) -> None:
    rows = random_rows(name, np.random.default_rng(2))
    place = 208 if name == "Q6_K" else 0
    rows[1, place : place + 2] = 255 if name == "MXFP4" else np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="1 of 12 scales that are not finite"):
        read(name, rows, (slice(None), slice(None)))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_weights_take_little_more_than_the_file(name: str) -> None:
    rows = random_rows(name, np.random.default_rng(0))
    held = sum(leaf.nbytes for leaf in read(name, rows, (slice(None), slice(None))).values())
    assert rows.nbytes <= held <= 1.04 * rows.nbytes
