"""The shapes of a model's parameters, found without memory for them, and how many there are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.block import Block
from penstock.engine.models.config import BlockConfig, ExpertsConfig, ModelConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layer_scans import stacked_layers

Shapes = Mapping[ParamPath, Any]
"""Shape and type of each array, by its path."""


class _OneKey(nnx.Rngs):
    """Gives all parameters of a module the same key, as nobody asks for their values.

    `nnx.Rngs` counts its keys. In a trace, jax searches all steps before each count: seconds for a deep model.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def decoder_shapes(config: ModelConfig, *, stacked: bool = False) -> tuple[nnx.GraphDef[Decoder], dict[ParamPath, Any]]:
    """Returns a decoder's structure, and its parameters' shapes and types. Layers of one kind are traced once."""
    model = nnx.eval_shape(lambda: Decoder(_with_one_layer(config), rngs=_OneKey()))
    if stacked:
        blocks = [_block(config, layers[0], len(layers)) for layers in stacked_layers(config)]
    else:
        blocks = [_block(config, layer) for layer in range(config.num_layers)]
    model.config, model.is_stacked, model.blocks = config, stacked, nnx.List(blocks)
    graph, state = nnx.split(model)
    return graph, _by_path(state)


def layer_shapes(block: BlockConfig, config: ModelConfig) -> Shapes:
    """Returns the parameter shapes of one layer, by path in the layer."""
    return _block_shapes(block, config.hidden_size, config.dtype)


@lru_cache(maxsize=64)
def _block_shapes(config: BlockConfig, hidden_size: int, dtype: str) -> Shapes:
    return MappingProxyType(_by_path(_traced(config, hidden_size, dtype)[1]))


def _block(config: ModelConfig, layer: int, *stack: int) -> Block:
    """Returns a block of only shapes: of one layer, or of a stack of so many layers like it."""
    graph, state = _traced(config.blocks[layer], config.hidden_size, config.dtype)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*stack, *leaf.shape), leaf.dtype), state)
    block: Block = nnx.merge(graph, shapes)
    return block


@lru_cache(maxsize=64)
def _traced(config: BlockConfig, hidden_size: int, dtype: str) -> tuple[nnx.GraphDef[Block], Any]:
    split: tuple[nnx.GraphDef[Block], Any] = nnx.split(
        nnx.eval_shape(lambda: Block(config, hidden_size, dtype=jnp.dtype(dtype), rngs=_OneKey()))
    )
    return split


def _with_one_layer(config: ModelConfig) -> ModelConfig:
    return replace(config, blocks=(replace(next(block for block in config.blocks if block.has_pages), packed=()),))


@lru_cache(maxsize=64)
def outer_shapes(config: ModelConfig) -> Shapes:
    """Returns the parameter shapes around the layers."""
    _, shapes = decoder_shapes(_with_one_layer(config))
    return MappingProxyType({path: leaf for path, leaf in shapes.items() if path[0] != "blocks"})


def num_parameters(config: ModelConfig) -> int:
    """Counts the parameters of a checkpoint of this geometry.

    Each KV head counts once, however many devices hold it. Padding and scales of the KV cache do not count.
    """
    around = _num_elements(outer_shapes(replace(config, packed=(), vocab_padding=0)))
    blocks = Counter(replace(_as_stored(block), packed=()) for block in config.blocks)
    return around + sum(count * _num_elements(layer_shapes(block, config)) for block, count in blocks.items())


def active_parameters(config: ModelConfig) -> int:
    """Counts the parameters that one token passes through: all but the experts that are not chosen."""
    asleep = matmul_parameters(config, lambda experts: experts.num_experts) - matmul_parameters(
        config, lambda experts: experts.num_chosen
    )
    return num_parameters(config) - round(asleep)


def matmul_parameters(config: ModelConfig, num_experts: Callable[[ExpertsConfig], float] | None = None) -> float:
    """Counts the parameters of all layers' matmuls, without norms, biases and tables. KV heads count as often as
    devices hold them.

    A mixture counts `num_experts(config)` experts; if that is None, as many as are held.
    """
    counts = Counter(replace(block, packed=()) for block in config.blocks)
    table = config.per_layer
    around = 0 if table is None else config.hidden_size * table.num_layers * table.size
    return around + sum(count * _num_in_kernels(block, config, num_experts) for block, count in counts.items())


def _num_elements(shapes: Shapes) -> int:
    return sum(math.prod(leaf.shape) for leaf in shapes.values())


def _num_in_kernels(
    block: BlockConfig, config: ModelConfig, num_experts: Callable[[ExpertsConfig], float] | None
) -> float:
    shapes = layer_shapes(block, config)
    kernels: dict[ParamPath, int] = {
        path: math.prod(leaf.shape) for path, leaf in shapes.items() if path[-1] == "kernel"
    }
    if num_experts is None or not isinstance(block.mlp, ExpertsConfig):
        return sum(kernels.values())
    held = block.mlp.num_experts + block.mlp.num_padding
    of_experts = sum(size for path, size in kernels.items() if "experts" in path)
    return sum(kernels.values()) - of_experts + of_experts / held * num_experts(block.mlp)


def _as_stored(block: BlockConfig) -> BlockConfig:
    mlp = block.mlp
    if isinstance(mlp, ExpertsConfig):
        block = replace(block, mlp=replace(mlp, num_padding=0))
    if not block.has_attention:
        return block
    num_kv_heads = block.attention.num_kv_heads // block.attention.kv_copies
    return block.with_attention(num_kv_heads=num_kv_heads, kv_copies=1, has_kv_scales=False)


def _by_path(state: Any) -> dict[ParamPath, Any]:
    flat: Any = nnx.to_flat_state(state)
    return dict(flat)
