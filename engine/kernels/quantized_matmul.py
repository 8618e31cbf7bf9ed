"""`x @ weight.T` of a quantized weight: codes come from HBM as they are held, and are unpacked in VMEM.

A grid of tiles of outputs, and of tokens within each: a tile of codes has whole rows, is fetched once, and unpacked for
each tile of tokens, some lanes at a time, while the matmul unit multiplies those before. Weights are rounded once, to
bfloat16, and products are summed in f32, as where XLA unpacks them; with one scale for a row the sum is scaled instead.

Two codes in a byte are neighbours in the input. They are not put side by side again: the low ones are multiplied by
the even features of `x`, the high ones by the odd ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.form import LANES_AT_ONCE, ROWS, KernelForm
from penstock.engine.kernels.unpacking import f32_of, spread, spread_column, values_of

F32, BF16 = jnp.float32, jnp.bfloat16
NAME = "quantized_matmul"
TILE_BYTES = 2**20  # of codes; the first one is fetched before anything is computed
MOST_TOKENS = 512  # in a tile
VMEM_BYTES = 48 * 2**20  # of 64 MiB on TPU7x and 128 MiB before it

Ref = Any


def quantized_matmul(
    form: KernelForm,
    x: jax.Array,  # bf16 [num_tokens, in]
    held: Mapping[str, jax.Array],  # by KernelForm.leaves, each with a first axis of layers
    layer: jax.Array,  # i32 []: whose weight of the stack it is
    *,
    interpret: Any = False,  # as of pallas_call
) -> jax.Array:
    """f32 `[num_tokens, out]`."""
    num_tokens, num_in = x.shape
    codes = held["codes"]
    num_out, num_lanes = codes.shape[1:]
    tokens, outs = min(num_tokens, MOST_TOKENS), tile_rows(num_out, num_lanes)
    planes = x.reshape(num_tokens, num_lanes, form.num_planes).transpose(2, 0, 1)
    if form.packing.rows > 1:  # there are few, which stay
        others = [pl.BlockSpec((1, *held["scales"].shape[1:]), lambda _, __, layer: (layer[0], 0, 0))]
    else:
        others = [
            pl.BlockSpec((1, held[name].shape[1], outs), lambda out, _, layer: (layer[0], 0, out))
            for name in form.leaves[1:]
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
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_out), F32),  # type: ignore[no-untyped-call]
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * num_in * num_out,
            transcendentals=0,
            bytes_accessed=form.num_bytes(held) + x.size * x.dtype.itemsize + 4 * num_tokens * num_out,
        ),
        interpret=interpret,
        name=NAME,
    )
    stacks = [held[name] for name in form.leaves]
    if not interpret:  # or XLA copies the scales of all layers into VMEM for each of them
        stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
    y: jax.Array = run(layer.reshape(1), planes, *stacks)
    return y


def tile_rows(num_out: int, num_lanes: int) -> int:
    """Rows of a tile of codes: all of a few, or else a multiple of ROWS."""
    most = max(TILE_BYTES // num_lanes // ROWS, 1) * ROWS
    return num_out if num_out <= ROWS else min(most, num_out // ROWS * ROWS)


def _kernel(packing: Packing, layer: Ref, x: Ref, codes: Ref, scales: Ref, *rest: Ref) -> None:
    del layer  # the tiles are its
    *offsets, out = rest
    size = min(ROWS, codes.shape[1])
    count, first = codes.shape[1] // size, pl.program_id(0) * codes.shape[1]

    def piece(number: Any, _: None) -> None:
        start = number * size
        rows = pl.ds(start if count == 1 else pl.multiple_of(start, size), size)
        if packing.rows > 1:
            tile = _Tile(packing, x, codes.at[0, rows], scales.at[0], block=(first + start) // packing.rows)
        else:
            tile = _Tile(packing, x, codes.at[0, rows], *(ref.at[0, :, rows] for ref in (scales, *offsets)))
        out[:, rows] = tile.product()

    if count == 1:
        piece(0, None)
    else:
        lax.fori_loop(0, count, piece, None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some rows of a weight, as references into VMEM."""

    packing: Packing
    x: Ref  # bf16 [planes, tokens, lanes]
    codes: Ref  # [rows, lanes]
    scales: Ref  # [groups, rows], or [groups, blocks of rows]
    offsets: Ref | None = None  # [groups, rows]
    block: Any = None  # i32: the one of the rows, where scales are of blocks

    @property
    def group_lanes(self) -> int:
        return int(self.packing.group // self.x.shape[0])

    def product(self) -> jax.Array:
        """f32 [tokens, rows]."""
        total: jax.Array = sum(
            self._of_lanes(start, min(LANES_AT_ONCE, self.codes.shape[1] - start))
            for start in range(0, self.codes.shape[1], LANES_AT_ONCE)
        )
        scaled: jax.Array = total if self.packing.group else self._scaled(total)
        return scaled

    def _of_lanes(self, start: int, num_lanes: int) -> Any:
        lanes = slice(start, start + num_lanes)
        values = values_of(self.packing, self.codes[:, lanes])
        if self.packing.group:
            values = self._weights(values, start, num_lanes)
        return sum(
            lax.dot_general(
                self.x[plane, :, lanes], of_plane.astype(BF16), (((1,), (1,)), ((), ())), preferred_element_type=F32
            )
            for plane, of_plane in enumerate(values)
        )

    def _weights(self, values: list[jax.Array], start: int, num_lanes: int) -> list[jax.Array]:
        groups = slice(start // self.group_lanes, -(-(start + num_lanes) // self.group_lanes))
        if self.block is not None:
            scales = spread_column(self.scales[groups], self.block, self.group_lanes, num_lanes)
            return [plane * scales for plane in values]
        scales = spread(self.packing, self.scales[groups], self.group_lanes, num_lanes)
        if self.offsets is None:
            return [plane * scales for plane in values]
        offsets = spread(self.packing, self.offsets[groups], self.group_lanes, num_lanes)
        if self.packing.offset == "zeros":
            return [(plane - offsets) * scales for plane in values]
        return [plane * scales - offsets for plane in values]

    def _scaled(self, total: jax.Array) -> jax.Array:
        """With what a row of the weight has one of, `[1, rows]`."""
        scales = f32_of(self.packing, self.scales[...])
        if self.offsets is None:
            return total * scales
        sums: Any = sum(jnp.sum(self.x[plane].astype(F32), axis=1, keepdims=True) for plane in range(self.x.shape[0]))
        offsets = sums * f32_of(self.packing, self.offsets[...])
        return (total - offsets) * scales if self.packing.offset == "zeros" else total * scales - offsets
