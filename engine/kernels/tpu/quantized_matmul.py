"""Computes `x @ weight.T` with a quantized weight: codes are read from HBM as they are held, and unpacked in VMEM.

The grid has tiles of outputs, and tiles of tokens within each. A tile of codes has whole rows and is fetched once. It
is unpacked for each tile of tokens, some lanes at a time, while the matmul unit multiplies the previous ones. Weights
are rounded once, to bfloat16, and products are summed in f32, as when XLA unpacks them. With one scale per row the sum
is scaled instead.

Two codes in a byte are neighbours in the input. They are not put side by side again: the low ones are multiplied by the
even features of `x`, the high ones by the odd ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import KernelForm
from penstock.engine.kernels.tpu.tiles import multiply_tile, scale_lanes, tile_rows

F32 = jnp.float32
MOST_TOKENS = 512  # in a tile
VMEM_BYTES = 48 * 2**20  # of 64 MiB on TPU7x and 128 MiB before it


def quantized_matmul(
    form: KernelForm,
    x: jax.Array,  # bf16 [num_tokens, in]
    held: Mapping[str, jax.Array],  # by KernelForm.names, each with a leading axis of layers
    layer: jax.Array,  # i32 []: the layer in the stack
    *,
    interpret: Any = False,  # as for pallas_call
) -> jax.Array:
    """Returns f32 `[num_tokens, out]`."""
    num_tokens, num_in = x.shape
    codes = held["codes"]
    num_out, num_lanes = codes.shape[1:]
    tokens, outs = min(num_tokens, MOST_TOKENS), tile_rows(num_out, num_lanes)
    planes = form.planes(x, num_lanes)
    if form.packing.rows > 1:  # there are few, and they stay
        others = [pl.BlockSpec((1, *held[form.names[1]].shape[1:]), lambda _, __, layer: (layer[0], 0, 0))]
    else:
        others = [
            pl.BlockSpec((1, held[name].shape[1], scale_lanes(outs)), lambda out, _, layer: (layer[0], 0, out))
            for name in form.names[1:]
        ]
    run = pl.pallas_call(
        partial(_kernel, form.packing),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_out, outs), pl.cdiv(num_tokens, tokens)),
            in_specs=[
                pl.BlockSpec((form.num_planes, tokens, num_lanes), lambda _, token, layer: (0, token, 0)),
                pl.BlockSpec((1, outs, num_lanes), lambda out, _, layer: (layer[0], out, 0)),
                *others,
            ],
            out_specs=pl.BlockSpec((tokens, outs), lambda out, token, layer: (token, out)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_out), F32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * num_in * num_out,
            transcendentals=0,
            bytes_accessed=form.num_bytes(held) + x.size * x.dtype.itemsize + 4 * num_tokens * num_out,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )
    stacks = [held[name] for name in form.names]
    if not interpret:  # otherwise XLA copies the scales of all layers into VMEM for each layer
        stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
    y: jax.Array = run(layer.reshape(1), planes, *stacks)
    return y


def _kernel(packing: Packing, layer: Ref, x: Ref, codes: Ref, scales: Ref, *rest: Ref) -> None:
    del layer  # used by the block specs
    *offsets, out = rest
    first = pl.program_id(0) * codes.shape[1]
    multiply_tile(packing, x, codes.at[0], scales.at[0], offsets[0].at[0] if offsets else None, out, first)
