"""Tensor parallelism: one mesh, and the one mapping of logical axes to mesh axes.

The weights are split as in Megatron-LM (Shoeybi et al., arXiv 1909.08053): each device holds some of the heads and some
of the feed-forward's features, so that a layer needs two all-reduces, one after attention and one after the
feed-forward. The KV cache is split over its heads; everything else is the same on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import Packing
from penstock.engine.models import BlockConfig, ModelConfig
from penstock.engine.models.axes import Axes

DATA, TENSOR = "data", "tensor"

RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": TENSOR,
        "heads": TENSOR,
        "kv_heads": TENSOR,
        "per_head": TENSOR,
        "mlp": TENSOR,
        "embed": None,
        "layers": None,
    }
)


@dataclass(frozen=True)
class Placement:
    """Where arrays go: a mesh of `data` x `tensor` devices, and which logical axes are split over `tensor`.

    What an axis of `data` larger than 1 holds is the same along it: a worker serves one replica. The planner uses it
    for a slice that holds several.
    """

    mesh: Mesh
    rules: Mapping[str, str | None]

    @property
    def tensor(self) -> int:
        return int(self.mesh.shape[TENSOR])

    def spec(self, axes: Axes) -> PartitionSpec:
        return PartitionSpec(  # type: ignore[no-untyped-call]
            *(None if axis is None else self.rules.get(axis) for axis in axes)
        )

    def sharding(self, axes: Axes = (), shape: Sequence[int] = ()) -> NamedSharding:
        """Of an array with these logical axes; of one that is the same everywhere, without any.

        With its `shape`, an axis that cannot be split evenly stays whole: groups of weights share what they share.
        """
        fitting = (
            [None if n % self._ways(axis) else axis for axis, n in zip(axes, shape, strict=True)] if shape else axes
        )
        return NamedSharding(self.mesh, self.spec(tuple(fitting)))

    def _ways(self, axis: str | None) -> int:
        over = None if axis is None else self.rules.get(axis)
        return 1 if over is None else int(self.mesh.shape[over])


def place(model: ModelConfig, devices: Sequence[jax.Device], tensor: int) -> Placement:
    """`devices` as a mesh for `model`, which `split_model` has accepted for `tensor`.

    A vocabulary that cannot be split evenly stays whole on every device.
    """
    mesh = Mesh(np.array(devices).reshape(-1, tensor), (DATA, TENSOR))
    rules = dict(RULES)
    if model.vocab_size % tensor:
        rules["vocab"] = None
    return Placement(mesh, MappingProxyType(rules))


def gathered(logits: jax.Array, placement: Placement | None) -> jax.Array:
    """`[num_rows, vocab]`, of which each device makes a part, whole on all: sampling parts would communicate more."""
    if placement is None:
        return logits
    for axes in ((None, "vocab"), ()):
        logits = jax.lax.with_sharding_constraint(logits, placement.sharding(axes))  # type: ignore[no-untyped-call]
    return logits


def split_model(model: ModelConfig, tensor: int) -> ModelConfig:
    """`model` as it is laid out over `tensor` devices: with each KV head held several times if there are too few.

    Raises:
        ConfigError: heads or features cannot be split evenly.
    """
    for block in dict.fromkeys(model.blocks):
        _check_split(model, block, tensor)
    return replace(model, blocks=tuple(_spread(block, tensor) for block in model.blocks))


def _check_split(model: ModelConfig, block: BlockConfig, tensor: int) -> None:
    kv_heads = block.attention.num_kv_heads
    for name, count in (
        ("attention heads", block.attention.num_heads),
        ("feed-forward features", block.mlp.intermediate_size),
    ):
        if count % tensor:
            raise ConfigError(
                f"tensor_parallel = {tensor} does not divide the model's {count} {name}; {_possible(model)} do"
            )
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"tensor_parallel = {tensor} neither divides the model's {kv_heads} KV heads nor is a multiple of them; "
            f"{_possible(model)} are possible"
        )


def _spread(block: BlockConfig, tensor: int) -> BlockConfig:
    """With at least one KV head for each device."""
    attention = block.attention
    if tensor <= attention.num_kv_heads:
        return block
    copies = tensor // attention.num_kv_heads
    copied = replace(attention, num_kv_heads=tensor, kv_copies=copies * attention.kv_copies)
    return replace(block, attention=copied, packed=tuple(_by_row(path, packing) for path, packing in block.packed))


def _by_row(path: tuple[str, ...], packing: Packing) -> tuple[tuple[str, ...], Packing]:
    """With scales that can be copied with the rows of a KV head: a block of rows may have several heads."""
    is_kv = path in (("attention", "k"), ("attention", "v"))
    return path, replace(packing, rows=1) if is_kv and packing.rows > 1 else packing


def _possible(model: ModelConfig) -> str:
    blocks = set(model.blocks)
    most = min(block.attention.num_heads for block in blocks)
    return ", ".join(str(n) for n in range(1, most + 1) if all(_can_split(block, n) for block in blocks))


def _can_split(block: BlockConfig, tensor: int) -> bool:
    heads, kv_heads = block.attention.num_heads, block.attention.num_kv_heads
    return (
        heads % tensor == 0
        and block.mlp.intermediate_size % tensor == 0
        and (kv_heads % tensor == 0 or tensor % kv_heads == 0)
    )
