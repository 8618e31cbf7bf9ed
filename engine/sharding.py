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
from penstock.engine.models import ModelConfig
from penstock.engine.models.axes import Axes

DATA, TENSOR = "data", "tensor"

RULES: Mapping[str, str | None] = MappingProxyType(
    {"vocab": TENSOR, "heads": TENSOR, "kv_heads": TENSOR, "mlp": TENSOR, "embed": None, "layers": None}
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

    def sharding(self, axes: Axes = ()) -> NamedSharding:
        """Of an array with these logical axes; of one that is the same everywhere, without any."""
        return NamedSharding(self.mesh, self.spec(axes))


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
    for name, count in (("attention heads", model.num_heads), ("feed-forward features", model.intermediate_size)):
        if count % tensor:
            raise ConfigError(
                f"tensor_parallel = {tensor} does not divide the model's {count} {name}; {_possible(model)} do"
            )
    if model.num_kv_heads % tensor == 0:
        return model
    if tensor % model.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel = {tensor} neither divides the model's {model.num_kv_heads} KV heads nor is a multiple "
            f"of them; {_possible(model)} are possible"
        )
    return replace(model, num_kv_heads=tensor, kv_copies=tensor // model.num_kv_heads)


def _possible(model: ModelConfig) -> str:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    fitting = [
        str(n)
        for n in range(1, heads + 1)
        if heads % n == 0 and model.intermediate_size % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    return ", ".join(fitting)
