"""Sums over devices of which one half travels while the other is multiplied (`engine/models/streams.py`).

The devices' SparseCores add them up beside the program; where there are none nothing overlaps, and sums stay whole. A
compiler has to be told (`engine/execution/compilation.py`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penstock.engine.models import Decoder, Overlap
from penstock.engine.models.streams import Halves
from penstock.engine.sharding import Placement

LEAST_BYTES = {4: 2**23, 8: 2**21}
"""Of a sum over so many devices that is worth two of half its size. Smaller ones, and those of two devices, take less
time than twice as many instructions lose, which write what is added up to HBM: by what libtpu's compiler expects.
"""

_Pair = tuple[jax.Array, jax.Array]


def overlap(model: Decoder, placement: Placement, least_bytes: int | None = None) -> None:
    """Has sums of at least so many bytes travel while others are computed, if all layers can be computed in halves.
    None: as many as pay.
    """
    config = model.config
    least_bytes = LEAST_BYTES.get(placement.num_shares) if least_bytes is None else least_bytes
    if least_bytes is not None and model.is_stacked and Halves.serve(config):
        num_tokens = math.ceil(least_bytes / (config.hidden_size * jnp.dtype(config.dtype).itemsize))
        model.overlap = Overlap(num_tokens, partial(_sum_halves, placement))


def _sum_halves(placement: Placement, x: jax.Array, kernels: _Pair) -> _Pair:
    """`SumHalves` of a kernel whose rows are split over all devices."""
    kernel = placement.spec(("mlp", "embed"))
    run = jax.shard_map(
        partial(_sum_halves_of_device, placement.replica),
        mesh=placement.mesh,
        in_specs=(placement.spec((None, "mlp")), (kernel, kernel)),
        out_specs=PartitionSpec(),  # type: ignore[no-untyped-call]
        check_vma=False,
    )
    first, second = run(x, kernels)
    return first, second


def _sum_halves_of_device(over: tuple[str, ...], x: jax.Array, kernels: _Pair) -> _Pair:
    """Rounded before they are added up: SparseCores do not round."""
    first, second = (jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype) for kernel in kernels)
    # What needs the first sum waits for the second product too, or the compiler would put that off.
    barrier: Any = jax.lax.optimization_barrier
    travelled, _ = barrier((_summed(first, over), second))
    return travelled, _summed(second, over)


def _summed(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    y: jax.Array = jax.lax.psum(x, over)  # type: ignore[no-untyped-call]
    return y
