"""Run by test_kernels.py in a process with eight host devices; prints one JSON object.

The interpreted kernel computes each quantized matmul of a small stacked model, and so does f64. Mixtures of experts are
compared with what XLA computes on one device.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.engine.formats.packing import Packing
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import Decoder, ExpertsConfig, MLPConfig
from penstock.engine.models.axes import logical_axes
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import GroupedLinear, Held, Linear
from penstock.engine.models.layers.quantized import Quantized, quantized_rows, unpacked
from penstock.engine.sharding.linears import TPUKernel, prepare_for_tpu
from penstock.engine.sharding.placement import place, split_model
from tests.engine.engines import TINY
from tests.engine.formats.quantized_stacks import random_stack
from tests.engine.sharding.devices import keep_as_told

PACKINGS = {
    ("attention", "q"): Packing("int4", 32, scale="float16", offset="minimums"),
    ("attention", "k"): Packing("int4", 32, scale="float16", offset="zeros"),
    ("attention", "v"): Packing("fp8", 0, rows=0),
    ("attention", "out"): Packing("fp8", 0, scale="bfloat16"),  # each device has a share of the input, and all scales
    ("mlp", "gate"): Packing("fp8", 128, rows=128),
    ("mlp", "up"): Packing("int4", 64, scale="bfloat16", has_int8_activations=True),
    ("mlp", "down"): Packing("int4", 128, scale="float16"),
}
EXPERTS = {
    "w8a8": Packing("int8", 0, has_int8_activations=True),
    "int8 in groups by int8": Packing("int8", 64, has_int8_activations=True),
    "int8 per channel": Packing("int8", 0),
    "fp8 per tensor": Packing("fp8", 0, rows=0),
}


def main() -> None:
    keep_as_told()
    found: dict[str, Any] = {
        "kernels": {},
        "errors": {},
        "mixtures": {name: mixtures(of) for name, of in EXPERTS.items()},
    }
    for tensor in (1, 2, 4):
        placement = place(jax.devices()[:tensor], tensor)
        model = filled(tensor, placement)
        linears = {path: linear for path, linear in nnx.iter_modules(model) if is_held(linear, Quantized)}
        expected = {path: exact_products(linear) for path, linear in linears.items()}
        model = prepare_for_tpu(model, placement, interpret=True)
        kernels = {path: kernel for path, kernel in nnx.iter_modules(model) if is_held(kernel, TPUKernel)}
        found["kernels"][str(tensor)] = len(kernels)
        for path, kernel in kernels.items():
            ours, theirs = products(kernel), expected[path]
            error = np.abs(ours - theirs).max() / np.abs(theirs).max()
            found["errors"][f"{tensor} {path}"] = float(error)
    json.dump(found, sys.stdout)


def filled(tensor: int, placement: Any) -> Decoder:
    first = replace(TINY.blocks[0], packed=tuple(PACKINGS.items()), mlp=MLPConfig(256))
    attention = replace(first.attention, num_heads=8, num_kv_heads=4, head_dim=32)
    config = replace(TINY, blocks=(replace(first, mixer=attention),) * 3, dtype="bfloat16", hidden_size=256)
    model = random_model(split_model(config, tensor), 0, placement=placement, stacked=True)
    for path, linear in nnx.iter_modules(model):
        if isinstance(linear, Linear) and isinstance(linear.held, Quantized):
            for name, leaf in random_stack(linear.held.packing, *linear.held.shape, 3).items():
                sharding = placement.sharding(logical_axes((*cast("tuple[str | int, ...]", path), name), 3), leaf.shape)
                setattr(linear, name, nnx.Param(jax.device_put(leaf, sharding)))
    return model


def mixtures(packing: Packing) -> dict[str, float]:
    """Returns how far the kernels' mixture over some devices, TENSORxEXPERT, is from that of XLA on one."""
    of_experts = tuple((("mlp", "experts", name), packing) for name in ("gate", "up", "down"))
    block = replace(TINY.blocks[0], mlp=ExpertsConfig(4, 2, 256), packed=of_experts)
    config = replace(TINY, blocks=(block,), dtype="bfloat16", hidden_size=256)

    def mixed(tensor: int, expert: int, *, by_kernel: bool) -> np.ndarray:
        placement = place(jax.devices()[: tensor * expert], tensor, expert)
        model = random_model(split_model(config, tensor, expert), 0, placement=placement)
        for path, linear in nnx.iter_modules(model):
            if isinstance(linear, GroupedLinear):
                assert isinstance(linear.held, Quantized)
                for name, leaf in random_stack(packing, *linear.held.shape, 4).items():
                    axes = logical_axes((*cast("tuple[str | int, ...]", path), name), 3)
                    setattr(linear, name, nnx.Param(jax.device_put(leaf, placement.sharding(axes, leaf.shape))))
        if by_kernel:
            model = prepare_for_tpu(model, placement, interpret=True)
        experts = cast("Experts", model.blocks[0].mlp).experts
        assert isinstance(experts.down.held, TPUKernel) == by_kernel
        chosen, weights = jnp.arange(18).reshape(9, 2) % 4, jnp.full((9, 2), 0.5)
        return np.asarray(jax.jit(experts.mix)(inputs(), chosen, weights), np.float64)

    expected = mixed(1, 1, by_kernel=False)
    found = {f"{t}x{e}": mixed(t, e, by_kernel=True) for t, e in ((1, 1), (4, 1), (2, 2))}
    return {layout: float(np.abs(y - expected).max() / np.abs(expected).max()) for layout, y in found.items()}


def is_held(module: Any, way: type[Held]) -> TypeGuard[Linear]:
    return isinstance(module, Linear) and isinstance(module.held, way)


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(9, 256)), jnp.bfloat16)


def exact_products(linear: Linear) -> np.ndarray:
    """Multiplies with each layer's weight in f64. With groups, the weight is rounded once; without, sums are scaled."""
    assert isinstance(linear.held, Quantized)
    packing = linear.held.packing
    weights = unpacked(packing, {name: jnp.asarray(np.asarray(array)) for name, array in linear.arrays.items()})
    rounded = weights.astype(jnp.bfloat16) if packing.group else weights
    x = np.asarray(inputs(), np.float64)
    if packing.has_int8_activations:
        codes, scales = quantized_rows(inputs())
        x = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
    return x @ np.asarray(rounded, np.float64).swapaxes(1, 2)


def products(kernel: Linear) -> np.ndarray:
    """Multiplies with each layer's weight, by the kernel."""
    graph, state = nnx.split(kernel)

    @jax.jit
    def product(state: Any, x: jax.Array, layer: jax.Array) -> jax.Array:
        one: Any = nnx.merge(graph, state)
        one.layer = layer
        y: jax.Array = one.wide(x)
        return y

    return np.stack([product(state, inputs(), jnp.int32(layer)) for layer in range(3)])


if __name__ == "__main__":
    main()
