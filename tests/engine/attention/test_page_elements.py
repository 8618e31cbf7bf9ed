"""Elements of TPU pages: every code of 8 bits keeps its value, and a row goes to its place in a tile alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.attention.fused.elements import PageElements
from penstock.engine.attention.fused.layout import tile_rows
from tests.engine.attention.ragged_batches import FP8

_CHIPS = ["TPU v6 lite", "TPU7x"]


def _codes(dtype: str) -> jax.Array:
    """Returns all codes that are numbers, in a page's row."""
    codes: jax.Array = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    return codes[jnp.isfinite(codes.astype(jnp.float32))][None]


@pytest.mark.parametrize("chip", _CHIPS)
@pytest.mark.parametrize("dtype", ["int8", FP8])
def test_every_code_is_passed_held_and_converted_as_it_is(dtype: str, chip: str) -> None:
    elements, codes = PageElements.on_chip(dtype, chip), _codes(dtype)

    @jax.jit
    def through() -> tuple[jax.Array, ...]:
        passed = elements.passed(codes).astype(jnp.float32)
        held = elements.narrowed(passed)
        values = elements.converted(held, jnp.dtype("bfloat16")).astype(jnp.float32)
        return passed, elements.widened(held), values * elements.factor

    passed, held, values = through()
    np.testing.assert_array_equal(held, passed)
    np.testing.assert_array_equal(values, codes.astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", FP8])
def test_a_row_is_put_in_its_place_of_a_tile_and_no_other(dtype: str) -> None:
    elements, rows = PageElements(dtype), tile_rows(dtype)
    numbers = np.random.default_rng(1).integers(-120, 120, (rows + 1, 128)).astype(np.float32)
    tile = elements.passed(jnp.asarray(numbers).astype(dtype)).astype(jnp.float32)

    @jax.jit
    def put(place: jax.Array, tile: jax.Array) -> jax.Array:
        held = elements.narrowed(tile[:rows])
        return elements.widened(elements.with_row(held, place, elements.bits(tile[rows:])))

    for place in range(-1, rows):
        expected = tile[:rows] if place < 0 else tile[:rows].at[place].set(tile[rows])
        np.testing.assert_array_equal(put(jnp.int32(place), tile), expected)
