"""The arrays of a model's states: their sizes, and where they are placed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from penstock.engine.attention import CacheArray
from penstock.engine.models import ModelConfig, layer_groups
from penstock.engine.models.attention_interface import LayerCache
from penstock.engine.sharding.placement import Placement

Arrays = tuple[tuple[CacheArray, ...], ...]
"""Arrays of each layer that keeps states, or of each kind of such layers."""


def state_arrays(model: ModelConfig, num_slots: int, *, is_stacked: bool) -> Arrays:
    """Returns the arrays for `num_slots`, slot 0 included, per layer or, stacked, for all layers of a kind."""
    return tuple(
        tuple(
            CacheArray(
                (num_slots * (kind.num_layers if is_stacked else 1), *array.shape), array.dtype, (None, *array.axes)
            )
            for array in kind.arrays
        )
        for kind in layer_groups(model).state_kinds
        for _ in range(1 if is_stacked else kind.num_layers)
    )


def slot_bytes(model: ModelConfig, placement: Placement | None) -> int:
    """Returns the bytes of one slot in all layers, on each device."""
    arrays: list[CacheArray] = jax.tree.leaves(state_arrays(model, 1, is_stacked=False))
    return sum(array.num_bytes // _num_shares(array, placement) for array in arrays)


def init_states(arrays: Arrays, placement: Placement | None) -> tuple[LayerCache, ...]:
    """Returns arrays of zeros. Like pages, every step takes, donates and returns them."""
    if not arrays:
        return ()
    if placement is None and jax.default_backend() != "tpu":
        return _zeros(arrays)
    formats = jax.tree.map(partial(_format, placement=placement), arrays)
    states: tuple[LayerCache, ...] = jax.jit(partial(_zeros, arrays), out_shardings=formats)()
    return states


def abstract_states(arrays: Arrays, placement: Placement) -> tuple[LayerCache, ...]:
    """Returns the shapes, each with its placement: for compiling without memory."""

    def shape(array: CacheArray) -> jax.ShapeDtypeStruct:
        place = _format(array, placement)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    states: tuple[LayerCache, ...] = jax.tree.map(shape, arrays)
    return states


def _zeros(arrays: Any) -> tuple[LayerCache, ...]:
    states: tuple[LayerCache, ...] = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), arrays)
    return states


def _format(array: CacheArray, placement: Placement | None) -> jax.sharding.Sharding | Format:
    """Returns the format of an array. On TPU slots stay the outermost axis: a kernel accesses single slots.

    The compiler would put another axis outermost if that pads less, and copy the array in each layer.
    """
    device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]
    sharding: jax.sharding.Sharding = SingleDeviceSharding(device)
    if placement is not None:
        sharding = placement.sharding(array.axes, array.shape)
    return Format(Layout(tuple(range(len(array.shape)))), sharding) if device.platform == "tpu" else sharding


def _num_shares(array: CacheArray, placement: Placement | None) -> int:
    return 1 if placement is None else max(placement.ways(axis) for axis in array.axes)
