"""Memory for weights."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from penstock.engine.formats.buffers import LARGE_BYTES, device_buffer, fill


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (1, 40), (40, 1), (7, 33), (3, 50, 16), (2, 3, 17, 35)])
def test_values_are_copied_in_any_order_of_memory(shape: tuple[int, ...], dtype: np.dtype) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    orders = [values, np.asfortranarray(values), values[..., ::-1]]
    if len(shape) > 1:
        orders.append(np.ascontiguousarray(values.swapaxes(-1, -2)).swapaxes(-1, -2))
    for order in orders:
        array = np.full((*shape[:-1], shape[-1] + 2), 9, dtype)
        fill(array[..., 1:-1], order)
        assert np.array_equal(array[..., 1:-1], order.astype(dtype))
        assert (array[..., [0, -1]] == 9).all()
        if len(shape) > 1:
            transposed = np.full((*shape[:-2], shape[-1], shape[-2]), 9, dtype).swapaxes(-1, -2)
            fill(transposed, order)
            assert np.array_equal(transposed, order.astype(dtype))


@pytest.mark.parametrize("size", [0, 3, LARGE_BYTES // 4])
def test_a_device_takes_the_memory_as_it_is(size: int) -> None:
    memory = device_buffer((size,), np.dtype(np.float32))
    assert not memory.any()
    memory[:] = 1
    array = jax.device_put(memory)
    memory[:] = 2
    assert (np.asarray(array) == 2).all()
