"""Computes `x @ weight.T` with a quantized weight: codes are read from HBM as they are held, and unpacked in VMEM.

The grid has tiles of outputs, and tiles of tokens within each. A tile of codes has all inputs and is fetched once. It
is unpacked for each tile of tokens, while the matmul unit multiplies by what was unpacked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import KernelForm
from penstock.engine.kernels.tpu.tiles import Tile, scale_scratch, tile_outputs
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES

F32 = jnp.float32
MOST_TOKENS = 512  # in a tile


def quantized_matmul(
    form: KernelForm,
    x: jax.Array,  # bf16 [num_tokens, in]
    held: Mapping[str, jax.Array],  # by KernelForm.names, each with a leading axis of layers
    layer: jax.Array,  # i32 []: the layer in the stack
    *,
    num_out: int,  # without padding
    interpret: Any = False,  # as for pallas_call
) -> jax.Array:
    """Returns f32 `[num_tokens, out]`."""
    num_tokens, num_in = x.shape
    num_rows, num_lanes = held["codes_by_input"].shape[1:]
    num_groups = held[form.names[1]].shape[1]
    x = form.rows_of(x, held["codes_by_input"])
    tokens, outs = min(num_tokens, MOST_TOKENS), tile_outputs(num_rows, num_lanes)
    if form.packing.rows > 1:  # there are few, and they stay
        others = [pl.BlockSpec((1, *held[form.names[1]].shape[1:]), lambda _, __, layer: (layer[0], 0, 0))]
    else:
        others = [pl.BlockSpec((1, num_groups, outs), lambda out, _, layer: (layer[0], 0, out)) for _ in form.names[1:]]
    run = pl.pallas_call(
        partial(_kernel, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_lanes, outs), pl.cdiv(num_tokens, tokens)),
            in_specs=[
                pl.BlockSpec((tokens, x.shape[1]), lambda _, token, layer: (token, 0)),
                pl.BlockSpec((1, num_rows, outs), lambda out, _, layer: (layer[0], 0, out)),
                *others,
            ],
            out_specs=pl.BlockSpec((tokens, outs), lambda out, token, layer: (token, out)),
            scratch_shapes=scale_scratch(form, num_groups, outs),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_out), F32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
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
    y: jax.Array = run(layer.reshape(1), x, *stacks)
    return y


def _kernel(form: KernelForm, layer: Ref, x: Ref, *refs: Ref) -> None:
    del layer  # used by the block specs
    count = len(form.names)
    codes, *held = (ref.at[0] for ref in refs[:count])
    tile = Tile(form, codes, held, list(refs[count + 1 :]), pl.program_id(0) * codes.shape[1])
    pl.when(pl.program_id(1) == 0)(tile.load_scales)
    tile.multiply(x, refs[count])
