"""Experts over the devices of a mesh: each device computes what its own experts add, and an all-reduce sums it up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from penstock.engine.models import Decoder
from penstock.engine.models.axes import logical_axes
from penstock.engine.models.layers.experts import Experts, GroupedMLP, mix
from penstock.engine.models.layers.quantized import Quantized
from penstock.engine.sharding.placement import EXPERT, TENSOR, Placement

_WHOLE: Any = PartitionSpec()


def shard_experts(model: Decoder, placement: Placement) -> Decoder:
    """Makes the experts of `model`, already laid out over `placement`, compute on the devices that hold them.

    The compiler does not know that a row only needs its own experts: left to itself, it gathers the weights of all.
    """
    if placement.num_shares > 1:
        for block in model.blocks:
            if isinstance(block.mlp, Experts):
                block.mlp.experts = ShardedExperts(block.mlp.experts, placement)
    return model


class ShardedExperts(GroupedMLP):
    """The feed-forwards of all experts, divided over the expert axis of a mesh and split over its tensor axis."""

    def __init__(self, experts: GroupedMLP, placement: Placement) -> None:
        self.gate, self.up, self.down = experts.gate, experts.up, experts.down
        self.num_experts, self.activation, self.clamped = experts.num_experts, experts.activation, experts.clamped
        self.placement = placement
        held = self.down.held
        if isinstance(held, Quantized) and placement.mesh.shape[TENSOR] > 1:
            self.down.held = replace(held, input_axis=TENSOR)

    @property
    def num_shares(self) -> int:
        return self.placement.num_shares

    def mix(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        graph, state = nnx.split(self)
        flat: Any = nnx.to_flat_state(state)
        params = {path: param[...] for path, param in flat}
        specs = {path: self._spec(path, array) for path, array in params.items()}
        run = jax.shard_map(
            partial(self._run_on_device, graph),
            mesh=self.placement.mesh,
            in_specs=(specs, _WHOLE, _WHOLE, _WHOLE, _WHOLE),
            out_specs=_WHOLE,
            check_vma=False,
        )
        y: jax.Array = run(params, x, chosen, weights, layer)
        return y

    def _spec(self, path: Any, array: jax.Array) -> PartitionSpec:
        axes = logical_axes(("blocks", 0, "mlp", "experts", *path), array.ndim)
        # One scale for all features of an expert is every device's, however the features are split.
        whole = (None if n == 1 else axis for axis, n in zip(axes, array.shape, strict=True))
        return self.placement.spec(tuple(whole))

    def _run_on_device(
        self, graph: Any, params: Any, x: jax.Array, chosen: jax.Array, weights: jax.Array, layer: jax.Array | None
    ) -> jax.Array:
        """Returns the sum over all devices; this one adds what its share of the parameters gives."""
        experts: GroupedMLP = nnx.merge(graph, nnx.from_flat_state({path: nnx.Param(a) for path, a in params.items()}))
        mesh = self.placement.mesh
        num_held = self.num_experts // mesh.shape.get(EXPERT, 1)
        if EXPERT in mesh.shape:
            number = chosen - jax.lax.axis_index(EXPERT) * num_held
            chosen = jnp.where((number >= 0) & (number < num_held), number, num_held)
        if experts.down.bias is not None:  # added once, not by each device that holds a part of an expert's features
            bias = experts.down.bias[...]
            experts.down.bias[...] = jnp.where(jax.lax.axis_index(TENSOR) == 0, bias, jnp.zeros_like(bias))
        y = mix(experts, x, chosen, weights, num_held, layer)
        return jax.lax.psum(y, self.placement.replica)  # type: ignore[no-any-return]
