"""Blocks of rows of logits for TPU, fetched from where they lie.

XLA's gather would first write the logits in another layout, a block to each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.execution.sampling.sampling_state import LANES
from penstock.engine.kernels.pallas import Ref


def fetch_blocks(logits: jax.Array, blocks: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Returns some blocks of LANES logits of each row of f32 logits `[num_rows, vocab]`: `[num_rows, count, LANES]`.

    `blocks`, i32 `[num_rows, count]`, says which ones. Beyond the vocabulary, they hold minus infinity.
    """
    num_rows, count = blocks.shape
    if logits.shape[1] % LANES:
        logits = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % LANES)), constant_values=-jnp.inf)
    held = logits if interpret else pltpu.with_memory_space_constraint(logits, pltpu.HBM)
    fetched: jax.Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((num_rows, count * LANES), lambda *_: (0, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, count * LANES), logits.dtype),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * 4 * blocks.size * LANES),
        interpret=interpret,
        name="fetch_blocks",
    )(blocks, held)
    return fetched.reshape(num_rows, count, LANES)


def _kernel(blocks: Ref, logits: Ref, out: Ref, arrived: Ref) -> None:
    num_rows, count = blocks.shape

    def each(do: Callable[[Any], None]) -> None:
        def of_row(row: Any, _: None) -> None:
            for i in range(count):
                start = pl.multiple_of(blocks[row, i] * LANES, LANES)
                source = logits.at[pl.ds(row, 1), pl.ds(start, LANES)]
                do(pltpu.make_async_copy(source, out.at[pl.ds(row, 1), pl.ds(i * LANES, LANES)], arrived))

        lax.fori_loop(0, num_rows, of_row, None)

    each(lambda transfer: transfer.start())
    each(lambda transfer: transfer.wait())
