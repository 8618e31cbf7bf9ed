"""The kernels for quantized weights, compiled for real topologies by libtpu, with no TPU: sizes of no whole tiles."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from test_kernels import FORMS

from penstock.engine.formats.packing import Packing, leaf_shapes
from penstock.engine.kernels import KernelForm, grouped_quantized_matmul, quantized_matmul
from penstock.engine.planning import has_libtpu
from penstock.engine.planning.topology import devices_of

pytestmark = [
    pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed: it is for Linux on x86-64"),
    pytest.mark.usefixtures("as_shipped"),
]
TOPOLOGIES = ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"]


def shapes(
    packing: Packing, num_out: int, num_in: int, leading: tuple[int, ...], place: SingleDeviceSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    """Of what the kernels are given; `leading` axes are of layers, and of experts."""
    form, found = KernelForm(packing), {}
    for leaf, name in zip(form.leaves, form.names, strict=True):
        shape, kind = leaf_shapes(packing, num_out, num_in)[leaf]
        made = jax.eval_shape(partial(form.held, leaf, num_out=num_out), jax.ShapeDtypeStruct((*leading, *shape), kind))
        found[name] = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=place)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", FORMS)
def test_matmuls_compile(topology: str, name: str) -> None:
    place, packing = SingleDeviceSharding(devices_of(topology)[0]), FORMS[name]
    num_tokens, num_out, num_in = 48, 200, 2304
    held = shapes(packing, num_out, num_in, (8,), place)
    x = jax.ShapeDtypeStruct((num_tokens, num_in), jnp.bfloat16, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    done = jax.jit(partial(quantized_matmul, KernelForm(packing))).lower(x, held, layer).compile()
    assert done.memory_analysis().temp_size_in_bytes == 0  # no weight is unpacked, and no stack copied


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("num_rows", [64, 2048])
def test_grouped_matmuls_compile(topology: str, num_rows: int) -> None:
    place, packing, size = SingleDeviceSharding(devices_of(topology)[0]), FORMS["mxfp4"], 2880
    held = shapes(packing, size, size, (2, 8), place)
    rows = jax.ShapeDtypeStruct((num_rows, size), jnp.bfloat16, sharding=place)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    multiply = jax.jit(partial(grouped_quantized_matmul, KernelForm(packing)))
    assert multiply.lower(rows, sizes, held, layer).compile() is not None


@pytest.mark.parametrize("name", FORMS)
def test_grouped_matmuls_read_stacks_as_they_are_held(name: str) -> None:
    """Of as many layers and experts as a tile has rows, which the compiler would rather have there than 12 groups."""
    place, packing = SingleDeviceSharding(devices_of("v6e:2x2")[0]), FORMS[name]
    held = shapes(packing, 200, 384, (8, 8), place)
    rows = jax.ShapeDtypeStruct((16, 384), jnp.bfloat16, sharding=place)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    done = jax.jit(partial(grouped_quantized_matmul, KernelForm(packing))).lower(rows, sizes, held, layer).compile()
    assert done.memory_analysis().temp_size_in_bytes == 0
