"""Kernels for quantized weights and delta nets, compiled for real topologies by libtpu, without a TPU.

Sizes are not whole tiles, and heads are the shares that devices have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.parts.tpu_kernels import held_shapes
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.tpu import (
    DeltaTokens,
    DeltaWeights,
    KernelForm,
    TokenSlots,
    gated_delta_rule,
    grouped_quantized_matmul,
    quantized_matmul,
)
from penstock.tools.plan.device.hlo import HloModule
from penstock.tools.plan.device.topology import devices_of
from tests.engine.kernels.test_kernels import FORMS, OF_BF16
from tests.support.needs import needs_libtpu
from tests.support.patience import pairs

pytestmark = [
    pytest.mark.versions,
    needs_libtpu,
    pytest.mark.usefixtures("as_shipped_elsewhere"),
]
TOPOLOGIES = ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"]


def form_on(place: SingleDeviceSharding, packing: Packing) -> KernelForm:
    device: Any = next(iter(place.device_set))
    return KernelForm.of_chip(packing, device.device_kind)


def shapes(
    packing: Packing, num_out: int, num_in: int, leading: tuple[int, ...], place: SingleDeviceSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    return held_shapes(form_on(place, packing), num_out, num_in, leading, place)


MATMULS = {**FORMS, **{f"{name}, bfloat16": packing for name, packing in OF_BF16.items()}}


@pytest.mark.parametrize(("name", "topology"), pairs(MATMULS, TOPOLOGIES))
def test_matmuls_compile(topology: str, name: str) -> None:
    place, packing = SingleDeviceSharding(devices_of(topology)[0]), MATMULS[name]
    form, num_tokens, num_out, num_in = form_on(place, packing), 48, 200, 2304
    held = shapes(packing, num_out, num_in, (8,), place)
    x = jax.ShapeDtypeStruct((num_tokens, num_in), jnp.bfloat16, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    done: Any = jax.jit(partial(quantized_matmul, form, num_out=num_out)).lower(x, held, layer).compile()
    assert done.memory_analysis().temp_size_in_bytes == 0  # no weight is unpacked, and no stack copied


@pytest.mark.parametrize(("topology", "num_rows"), pairs(TOPOLOGIES, [64, 2048]))
def test_grouped_matmuls_compile(topology: str, num_rows: int) -> None:
    place, packing, size = SingleDeviceSharding(devices_of(topology)[0]), FORMS["mxfp4"], 2880
    held = shapes(packing, size, size, (2, 8), place)
    rows = jax.ShapeDtypeStruct((num_rows, size), jnp.bfloat16, sharding=place)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    multiply = jax.jit(partial(grouped_quantized_matmul, form_on(place, packing), num_out=size))
    assert multiply.lower(rows, sizes, held, layer).compile() is not None


@pytest.mark.parametrize("name", FORMS)
def test_grouped_matmuls_read_stacks_as_they_are_held(name: str) -> None:
    """There are as many layers and experts as a tile has rows; the compiler would rather tile those than 12 groups."""
    place, packing = SingleDeviceSharding(devices_of("v6e:2x2")[0]), FORMS[name]
    held = shapes(packing, 200, 384, (8, 8), place)
    rows = jax.ShapeDtypeStruct((16, 384), jnp.bfloat16, sharding=place)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    multiply = partial(grouped_quantized_matmul, form_on(place, packing), num_out=200)
    done: Any = jax.jit(multiply).lower(rows, sizes, held, layer).compile()
    entry = HloModule(done.as_text()).entry
    (kernel,) = (found for found in entry.instructions.values() if found.is_quantized_grouped_matmul)
    stacks = [entry.parameters[index] for index in range(2, 2 + len(held))]
    assert set(stacks) <= set(kernel.operands)  # as they came in, not a copy


@pytest.mark.parametrize(
    ("topology", "num_tokens", "key_heads", "value_heads"),
    [("v5e:2x2", 64, 2, 6), ("v6e:2x2", 16, 16, 48), ("v6e:2x2", 2048, 4, 8), ("tpu7x:2x2x1", 16, 2, 4)],
)
def test_delta_nets_compile_and_move_each_state_once(
    topology: str, num_tokens: int, key_heads: int, value_heads: int
) -> None:
    """Heads are all of Qwen3.6-27B's, an eighth of them, or shares of Qwen3.6-35B-A3B's."""
    place, num_slots, num_taps, size = SingleDeviceSharding(devices_of(topology)[0]), 65, 4, 128

    def shape(*sizes: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    keys, values = (key_heads, size), (value_heads, size)
    wide: Callable[..., Any] = partial(shape, dtype="float32")
    tokens = DeltaTokens(
        *[*(shape(num_tokens, *heads) for heads in (keys, keys, values, values)), wide(num_tokens, 2, value_heads)]
    )
    weights = DeltaWeights(
        *[*(wide(num_taps, *heads) for heads in (keys, keys, values)), *map(wide, (value_heads, value_heads, size))]
    )
    states = (
        *(shape(num_slots, num_taps - 1, *heads) for heads in (keys, keys, values)),
        wide(num_slots, value_heads, size, size),
    )
    slots = TokenSlots(*(shape(num_tokens, dtype="int32") for _ in TokenSlots._fields))
    run = partial(gated_delta_rule, num_writes=num_slots - 1, eps=1e-6)

    @partial(jax.jit, donate_argnums=3)
    def layers(
        tokens: DeltaTokens, weights: DeltaWeights, slots: TokenSlots, states: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs layers in a loop, as a stacked decoder does."""

        def layer(
            _: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, ...]]
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return run(tokens._replace(gate=carry[0]), weights, slots, carry[1])

        made: tuple[jax.Array, tuple[jax.Array, ...]] = jax.lax.fori_loop(0, 3, layer, (tokens.gate, states))
        return made

    done: Any = layers.lower(tokens, weights, slots, states).compile()
    memory, num_written = done.memory_analysis(), min(num_tokens, num_slots - 1)
    assert memory.alias_size_in_bytes >= sum(state.size * state.dtype.itemsize for state in states)
    assert memory.temp_size_in_bytes <= 2**20  # no copy of the matrices
    if topology.startswith("tpu7x"):  # libtpu cannot print its programs
        return
    traffic = HloModule(done.as_text()).traffic(cache_bytes=10**12)
    moved = 2 * num_written * sum(state.size // num_slots * state.dtype.itemsize for state in states)
    inputs = num_tokens * (2 * key_heads + 3 * value_heads) * size * 2
    assert 2.97 * moved <= traffic.kernel_bytes <= 3 * (1.02 * (moved + inputs) + 2**18)
