"""Sums over devices of which one half travels while the other is multiplied (`engine/models/streams.py`).

The devices' SparseCores add them up beside the program; where there are none nothing overlaps, and sums stay whole. A
compiler has to be told (`engine/execution/compilation.py`).

Halves are twice as many instructions, and what SparseCores add up goes through HBM, where sums of the program itself
stay in VMEM. What that costs and what it saves was read from libtpu's estimates (docs/tpu.md); hence the bounds below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penstock.engine.models import Decoder, ModelConfig, Overlap, matmul_parameters
from penstock.engine.models.streams import Halves
from penstock.engine.sharding import Placement

_LEAST_BYTES = {4: 2**22, 8: 2**21}  # of a sum over so many devices; those over two take next to no time
_LEAST_LAYER_BYTES = 10**8  # of the weights on a device: there is little else to compute meanwhile
_MOST_HBM_SHARE = 0.08  # of the weights' bytes, in steps that wait for those
_HBM_PASSES = 7  # over the hidden states of a step, in a layer
_COMPUTE_BOUND = 512  # tokens of a step, from which on it waits for matmuls
_LEAST_TRAVELLING_END = 2**22  # bytes of a sum at the end of a layer, where nothing hides the second half

_Pair = tuple[jax.Array, jax.Array]


def overlap(model: Decoder, placement: Placement, pays: Callable[[int], bool] | None = None) -> None:
    """Has sums travel while others are computed, if all layers can be computed in halves: in steps of as many tokens as
    `pays` says; None: where it is expected to.
    """
    if model.is_stacked and Halves.serve(model.config):
        pays = partial(_pays, model.config, placement.num_shares) if pays is None else pays
        model.overlap = Overlap(pays, partial(_sum_halves, placement))


def _pays(config: ModelConfig, num_devices: int, num_tokens: int) -> bool:
    item_bytes = int(jnp.dtype(config.dtype).itemsize)
    sum_bytes = num_tokens * config.hidden_size * item_bytes
    layer_bytes = matmul_parameters(config) * item_bytes / config.num_layers / num_devices
    if num_devices not in _LEAST_BYTES or sum_bytes < _LEAST_BYTES[num_devices] or layer_bytes < _LEAST_LAYER_BYTES:
        return False
    return num_tokens >= _COMPUTE_BOUND or _HBM_PASSES * sum_bytes <= _MOST_HBM_SHARE * layer_bytes


def _sum_halves(placement: Placement, x: jax.Array, kernels: _Pair, *, ends_layer: bool) -> _Pair:
    """`SumHalves` of a kernel whose rows are split over all devices."""
    stays = ends_layer and x.shape[0] * 2 * kernels[0].shape[1] * x.dtype.itemsize < _LEAST_TRAVELLING_END
    kernel = placement.spec(("mlp", "embed"))
    run = jax.shard_map(
        partial(_sum_halves_of_device, over=placement.replica, stays=stays),
        mesh=placement.mesh,
        in_specs=(placement.spec((None, "mlp")), (kernel, kernel)),
        out_specs=PartitionSpec(),  # type: ignore[no-untyped-call]
        check_vma=False,
    )
    first, second = run(x, kernels)
    return first, second


def _sum_halves_of_device(x: jax.Array, kernels: _Pair, over: tuple[str, ...], *, stays: bool) -> _Pair:
    """What travels is rounded before, as SparseCores do not round; so a second half that is rounded behind its sum
    `stays` with the program, and in VMEM.
    """
    first, second = (jnp.dot(x, kernel, preferred_element_type=jnp.float32) for kernel in kernels)
    second = second if stays else second.astype(x.dtype)
    # What needs the first sum waits for the second product too, or the compiler would put that off.
    barrier: Any = jax.lax.optimization_barrier
    travelled, _ = barrier((_summed(first.astype(x.dtype), over), second))
    return travelled, _summed(second, over).astype(x.dtype)


def _summed(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    y: jax.Array = jax.lax.psum(x, over)  # type: ignore[no-untyped-call]
    return y
