"""Counts, array by array, what each device holds of a model's weights and what a step reads of them.

A quantized array counts the bytes of the arrays that hold it. An array that the devices do not divide counts whole on
each of them, as `Placement` lays it out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.kernels.tpu import LANES, KernelForm
from penstock.engine.models import BlockConfig, ExpertsConfig, ModelConfig, ParamPath, layer_shapes, outer_shapes
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding.placement import Placement

NumExperts = Callable[[ExpertsConfig], float]


def device_bytes(model: nnx.Module) -> int:
    """Returns the bytes of an abstract model's parameters on each device, including padding added at loading."""
    arrays: list[jax.ShapeDtypeStruct] = jax.tree.leaves(nnx.state(model))
    return sum(_shard_bytes(array) for array in arrays)


def _shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return _num_bytes(jax.ShapeDtypeStruct(shape, array.dtype))


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    num_bytes: int = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
    return num_bytes


def held_bytes(model: ModelConfig, placement: Placement | None) -> int:
    """Returns the bytes of all weights on each device. `placement` is that of `model`; None: on one device."""
    return round(_layer_bytes(model, placement, None) + sum(_outer_bytes(model, placement).values()))


def step_weight_bytes(model: ModelConfig, num_tokens: int, placement: Placement | None) -> int:
    """Returns what one step of `num_tokens` reads of the weights, on the device that reads the most."""
    outer = _outer_bytes(model, placement)
    # Tables that are not a head are read one row per token.
    tables = outer["per_layer_embedding"] + (0 if model.tie_word_embeddings else outer["embedding"])
    features = model.hidden_size + (0 if model.per_layer is None else model.per_layer.num_layers * model.per_layer.size)
    rows = num_tokens * features * int(jnp.dtype(model.dtype).itemsize)
    layers = _layer_bytes(model, placement, lambda mixture: distinct_experts(mixture, num_tokens))
    return round(layers) + sum(outer.values()) - tables + rows


def grouped_matmul_bytes(
    model: ModelConfig, num_tokens: int, placement: Placement | None, num_matmuls: int, *, quantized: bool = False
) -> int:
    """Returns what `num_matmuls` grouped matmuls read of their experts in a step.

    Experts are in the model's type or, if `quantized`, read by the kernel for codes, with their scales and all padding.
    """
    num_all, total = 0, 0.0
    for block, count in Counter(model.blocks).items():
        if isinstance(block.mlp, ExpertsConfig):
            matrices = _expert_bytes(block, model, placement, quantized=quantized)
            share = distinct_experts(block.mlp, num_tokens) / block.mlp.num_experts
            num_all, total = num_all + count * len(matrices), total + count * sum(matrices) * share
    return round(total * num_matmuls / num_all) if num_all else 0


@lru_cache(maxsize=64)
def _expert_bytes(
    block: BlockConfig, model: ModelConfig, placement: Placement | None, *, quantized: bool
) -> tuple[int, ...]:
    """Returns the bytes of each matrix of a layer's experts, over all experts that a device holds."""
    block = block if quantized else replace(block, packed=())
    shards = dict(_shards(layer_shapes(block, model), ("blocks", 0), placement))
    if not quantized:
        kernels = [path for path in shards if path[2:4] == ("mlp", "experts") and path[-1] == "kernel"]
        return tuple(_num_bytes(_padded(path, shards[path])) for path in kernels)
    matrices = []
    for at, packing in block.packed:
        form = KernelForm(packing)
        if at[:2] == ("mlp", "experts") and form.serves(packing, of_experts=True):
            held = form.shapes({leaf: shards["blocks", 0, *at, leaf] for leaf in form.leaves})
            matrices.append(sum(_num_bytes(array) for array in held.values()))
    return tuple(matrices)


def _padded(path: ParamPath, kernel: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a device's kernel of experts as `prepare_for_tpu` pads it."""
    inside = logical_axes(path, len(kernel.shape)).index("expert_mlp")
    shape = [-(-size // LANES) * LANES if place == inside else size for place, size in enumerate(kernel.shape)]
    return jax.ShapeDtypeStruct(shape, kernel.dtype)


def distinct_experts(mixture: ExpertsConfig, num_tokens: int) -> float:
    """Returns the expected number of experts that `num_tokens` tokens choose."""
    share = mixture.num_chosen / mixture.num_experts
    return mixture.num_experts * (1 - (1 - share) ** num_tokens)


def vocab_padding_bytes(model: ModelConfig, placement: Placement | None) -> int:
    """Returns the padding in embedding and head, on each device."""
    tables = {name: num for name, num in _outer_bytes(model, placement).items() if name in ("embedding", "head")}
    return sum(tables.values()) * model.vocab_padding // model.vocab_rows


def _layer_bytes(model: ModelConfig, placement: Placement | None, num_read: NumExperts | None) -> float:
    """Returns the bytes of all layers; experts count by the share that `num_read` is of all.

    Some devices may hold padding among their experts, which nothing reads: those devices read less.
    """
    total = 0.0
    for block, count in Counter(model.blocks).items():
        share = num_read(block.mlp) / block.mlp.num_experts if num_read and isinstance(block.mlp, ExpertsConfig) else 1
        for path, num_bytes in _arrays(layer_shapes(block, model), ("blocks", 0), placement):
            total += count * num_bytes * (share if path[2:4] == ("mlp", "experts") else 1)
    return total


def _outer_bytes(model: ModelConfig, placement: Placement | None) -> Counter[str]:
    """Returns the bytes outside the layers: embedding, norm and head."""
    found: Counter[str] = Counter()
    for path, num_bytes in _arrays(outer_shapes(model), (), placement):
        found[str(path[0])] += num_bytes
    return found


def _arrays(shapes: Any, at: ParamPath, placement: Placement | None) -> Iterator[tuple[ParamPath, int]]:
    """Yields each array below `at`, with its bytes on a device."""
    for path, shard in _shards(shapes, at, placement):
        yield path, _num_bytes(shard)


def _shards(
    shapes: Any, at: ParamPath, placement: Placement | None
) -> Iterator[tuple[ParamPath, jax.ShapeDtypeStruct]]:
    """Yields each array below `at`, as a device holds it."""
    for path, leaf in shapes.items():
        whole = (*at, *path)
        shape = leaf.shape
        if placement is not None:
            shape = placement.sharding(logical_axes(whole, len(shape)), shape).shard_shape(shape)
        yield whole, jax.ShapeDtypeStruct(shape, leaf.dtype)
