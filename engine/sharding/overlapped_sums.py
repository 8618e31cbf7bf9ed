"""All-reduces in two parts: one travels while the other is computed (`engine/models/residual_stream.py`).

The devices' SparseCores do the sums next to the program. Without SparseCores nothing overlaps, and sums stay whole. The
compiler needs flags for it (`engine/execution/compilation.py`).

Two parts take twice as many instructions, and SparseCores sum through HBM, while the program's own sums stay in VMEM.
The costs and savings come from libtpu's estimates (docs/tpu-kernels.md); hence the bounds below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penstock.engine.models import Decoder, ModelConfig, Overlap, matmul_parameters
from penstock.engine.models.residual_stream import ResidualStream
from penstock.engine.sharding.placement import Placement

_LEAST_BYTES = {4: 2**22, 8: 2**21}  # of a sum, by number of devices; sums over two take next to no time
_LEAST_LAYER_BYTES = 10**8  # of a layer's weights on a device: below it there is too little to compute meanwhile
_MOST_HBM_SHARE = 0.08  # of the weights' bytes, in memory-bound steps
_HBM_PASSES = 7  # over a step's hidden states, per layer
_COMPUTE_BOUND = 512  # tokens from which on a step is compute-bound
_LEAST_TRAVELLING_END = 2**22  # bytes of a sum at a layer's end, where nothing hides the second part

_Parts = tuple[jax.Array, ...]


def overlap(model: Decoder, placement: Placement, pays: Callable[[int], bool] | None = None) -> None:
    """Overlaps sums with compute in steps whose number of tokens `pays` accepts, by default where estimates say so.

    All layers must allow computing in parts.
    """
    if pays is None and _can_pay(model.config, placement.num_shares):
        pays = partial(_pays, model.config, placement.num_shares)
    if pays is not None and model.is_stacked and ResidualStream.serve(model.config):
        model.overlap = Overlap(pays, partial(_sum_parts, placement))


def _can_pay(config: ModelConfig, num_devices: int) -> bool:
    return num_devices in _LEAST_BYTES and _layer_bytes(config, num_devices) >= _LEAST_LAYER_BYTES


def _pays(config: ModelConfig, num_devices: int, num_tokens: int) -> bool:
    sum_bytes = num_tokens * config.hidden_size * _item_bytes(config)
    if sum_bytes < _LEAST_BYTES[num_devices]:
        return False
    return num_tokens >= _COMPUTE_BOUND or _HBM_PASSES * sum_bytes <= _MOST_HBM_SHARE * _layer_bytes(
        config, num_devices
    )


def _layer_bytes(config: ModelConfig, num_devices: int) -> float:
    """Returns the average bytes of a layer's weights on a device."""
    return matmul_parameters(config) * _item_bytes(config) / config.num_layers / num_devices


def _item_bytes(config: ModelConfig) -> int:
    return int(jnp.dtype(config.dtype).itemsize)


def _sum_parts(placement: Placement, x: jax.Array, kernels: _Parts, *, ends_layer: bool) -> _Parts:
    """Implements `SumParts` for a kernel whose rows are split over all devices."""
    kernel = placement.spec(("mlp", "embed"))
    num_out = sum(kernel.shape[1] for kernel in kernels)
    stays = ends_layer and x.shape[0] * num_out * x.dtype.itemsize < _LEAST_TRAVELLING_END
    run = jax.shard_map(
        partial(_sum_parts_of_device, over=placement.replica, stays=stays),
        mesh=placement.mesh,
        in_specs=(placement.spec((None, "mlp")), (kernel,) * len(kernels)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return tuple(run(x, kernels))


def _sum_parts_of_device(x: jax.Array, kernels: _Parts, over: tuple[str, ...], *, stays: bool) -> _Parts:
    """Computes this device's parts and sums each over all devices.

    Parts are rounded before the sum, because SparseCores do not round. If the last sum `stays` with the program, in
    VMEM, it is a scatter and a gather, which the compiler does not give to SparseCores.
    """
    *first, last = (jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype) for kernel in kernels)
    if not first:
        return (_summed(last, over),)
    # Users of the first sum also wait for the second matmul; otherwise the compiler would delay that.
    barrier: Any = jax.lax.optimization_barrier
    travelled, _ = barrier((_summed(first[0], over), last))
    return travelled, _summed_here(last, over) if stays else _summed(last, over)


def _summed(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    y: jax.Array = jax.lax.psum(x, over)
    return y


def _summed_here(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    scatter: Any = jax.lax.psum_scatter
    y: jax.Array = jax.lax.all_gather(scatter(x, over, scatter_dimension=1, tiled=True), over, axis=1, tiled=True)
    return y
