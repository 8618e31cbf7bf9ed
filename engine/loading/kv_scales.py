"""Scales that a checkpoint has for its KV cache: the names of their tensors, and how they are read.

Name suffixes of a layer's attention, by the program that writes them:

| keys, values | |
| --- | --- |
| `k_scale`, `v_scale` | compressed-tensors |
| `k_proj.k_scale`, `v_proj.v_scale` | ModelOpt |
| `attn.k_scale`, `attn.v_scale` | vLLM |
| `k_proj.output_scale`, `v_proj.output_scale` | compressed-tensors, earlier |
| `kv_scale` | AutoFP8: one for both |

Each is a float for the whole layer, or one for each KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.kv_cache import KVCacheScheme
from penstock.engine.formats.tensor_mapping import FLOAT_KINDS, Index
from penstock.engine.models import Family, ModelConfig, ParamPath
from penstock.engine.models.attention_interface import KV_SCALES_DTYPE
from penstock.engine.models.axes import KV_SCALES

_LEAST = 1e-30  # of a scale: pages are quantized by its inverse, which must be finite

_TENSORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        f"{x}_scale": (f"{x}_scale", f"{x}_proj.{x}_scale", f"attn.{x}_scale", f"{x}_proj.output_scale", "kv_scale")
        for x in "kv"
    }
)
_OF_QUERIES = ("q_scale", "attn.q_scale", "q_proj.output_scale")  # queries are never quantized here


@dataclass(frozen=True, slots=True)
class KVScaleSource:
    """The source of the scales of keys, or of values: those of one layer, or of all layers of a stack."""

    path: ParamPath
    shape: tuple[int, ...]  # [num_kv_heads], or [layers, num_kv_heads]
    names: tuple[str, ...]  # of each layer
    copies: int  # number of times that each KV head is repeated

    @property
    def dtype(self) -> jnp.dtype:
        held: jnp.dtype = jnp.dtype(jnp.float32)
        return held

    @property
    def num_spread(self) -> int:
        return len(self.shape) - 1

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.shape[-1] // self.copies,)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(FLOAT_KINDS)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Checks whether there is one scale for all heads, or one for each; axes of 1 do not count."""
        return math.prod(shape) == 1 or tuple(size for size in shape if size > 1) == self.stored_shape

    @property
    def cut(self) -> tuple[int, int]:
        return 0, self.shape[-1]

    def num_bytes(self, stored: object) -> int:
        """Returns the bytes of the scales as held."""
        del stored
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, tensor: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """Reads the scales of the heads that `index` selects.

        Raises:
            CheckpointError: one is not a finite number above 1e-30.
        """
        values = np.asarray(tensor(()), np.float32).reshape(-1)
        unusable = values[~(np.isfinite(values) & (values > _LEAST))]
        if unusable.size:
            raise CheckpointError(f"holds a scale of {unusable[0]}, expected finite numbers above {_LEAST}")
        if values.size == 1:
            return np.broadcast_to(values, self.shape[-1:])[index]
        return np.repeat(values, self.copies)[index]


def with_kv_scales(
    config: ModelConfig, family: Family, scheme: KVCacheScheme | None, stored: Mapping[str, Any]
) -> ModelConfig:
    """Returns `config` with the KV cache settings of a checkpoint with these tensors, if any are known.

    Layers have scales if the scheme promises them, or any tensor has one.
    """
    has_scales = scheme is not None and scheme.is_static
    if not has_scales and not any(name in stored for name in _names(family, config, _TENSORS)):
        return config if scheme is None else replace(config, kv_dtype=KV_SCALES_DTYPE)
    blocks = tuple(block.with_attention(has_kv_scales=True) if block.has_pages else block for block in config.blocks)
    return replace(config, blocks=blocks, kv_dtype=None if scheme is None else KV_SCALES_DTYPE)


def is_kv_scale(path: ParamPath) -> bool:
    return path[-1] in KV_SCALES


def kv_scale_source(
    family: Family,
    path: ParamPath,
    layers: Sequence[ParamPath],
    shape: tuple[int, ...],
    config: ModelConfig,
    stored: Mapping[str, Any],
) -> KVScaleSource:
    """Returns the source of the parameter at `path`, which belongs to all of `layers`."""
    names = []
    for layer in layers:
        possible = [f"{_attention(family, int(layer[1]))}.{tensor}" for tensor in _TENSORS[str(path[-1])]]
        names.append(next((name for name in possible if name in stored), possible[0]))
    return KVScaleSource(path, shape, tuple(names), config.blocks[int(layers[0][1])].attention.kv_copies)


def passed_over(family: Family, config: ModelConfig) -> set[str]:
    """Returns the names of scales that `config` has no use for: those of queries, and all others if pages are
    not fp8.
    """
    names = set(_names(family, config, {"q_scale": _OF_QUERIES}))
    if any(attention.has_kv_scales for attention in config.attentions):
        return names
    return names | set(_names(family, config, _TENSORS))


def _names(family: Family, config: ModelConfig, tensors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for layer in (layer for layer, block in enumerate(config.blocks) if block.has_attention):
        attention = _attention(family, layer)
        yield from (f"{attention}.{tensor}" for names in tensors.values() for tensor in names)


def _attention(family: Family, layer: int) -> str:
    """Returns the checkpoint's name of a layer's attention."""
    kernel = family.tensor_name(("blocks", layer, "attention", "out", "kernel"))
    return kernel.removesuffix(".weight").rpartition(".")[0]
