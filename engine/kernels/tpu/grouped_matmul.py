"""Multiplies rows by the quantized weights of their experts. Only those of experts with rows are read from HBM.

Each expert's rows are padded to whole tiles, as in MegaBlocks (Gale et al., arXiv 2211.15841). So a tile of rows has
one expert, whose number is in scalar memory. The grid has tiles of outputs, and tiles of rows within each: a tile of an
expert's codes, with its scales, is fetched once for all its rows. Tiles after the last one with rows get the same
inputs as that one, so that nothing is fetched for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import KernelForm
from penstock.engine.kernels.tpu.tiles import Tile, scale_scratch, tile_outputs
from penstock.engine.kernels.tpu.vmem import VMEM_BYTES

F32, I32 = jnp.float32, jnp.int32
GROUPED_QUANTIZED_MATMUL = "grouped_quantized_matmul"  # its name in a compiled program
FEWEST_ROWS, MOST_ROWS = 16, 256  # in a tile


class Tiles(NamedTuple):
    """Locations of the rows of each expert after padding."""

    experts: jax.Array  # i32 [num_tiles]: each tile's expert; after the last tile with rows, that tile's
    num: jax.Array  # i32 [1]: number of tiles with rows, at least 1
    sources: jax.Array  # i32 [num_tiles * rows of a tile]: the row in each place
    places: jax.Array  # i32 [num_rows]: the place of each row; undefined for rows without an expert


def grouped_quantized_matmul(
    form: KernelForm,
    rows: jax.Array,  # bf16 [num_rows, in], in the order of their experts
    sizes: jax.Array,  # i32 [num_experts]: rows of each; rows after all of them are undefined
    held: Mapping[str, jax.Array],  # by KernelForm.names, each with leading axes of layers and experts
    layer: jax.Array,  # i32 []: the layer in the stack
    *,
    num_out: int,  # without padding
    interpret: Any = False,  # as for pallas_call
) -> jax.Array:
    """Returns f32 `[num_rows, out]`; rows after those of all experts are undefined."""
    num_rows, num_in = rows.shape
    codes = held["codes_by_input"]
    num_lanes = codes.shape[3]
    size, outs = rows_of_a_tile(num_rows, sizes.shape[0]), tile_outputs(*codes.shape[2:])
    tiles = tiles_of(sizes, num_rows, size)
    num_tiles = tiles.experts.shape[0]
    x = form.rows_of(rows, codes)[tiles.sources]

    def used_tile(tile: Any, num: Ref) -> Any:
        return jnp.minimum(tile, num[0] - 1)

    run = pl.pallas_call(
        partial(_kernel, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(num_lanes, outs), num_tiles),
            in_specs=[
                pl.BlockSpec((size, x.shape[1]), lambda _, tile, layer, experts, num: (used_tile(tile, num), 0)),
                *_expert_specs(form, held, outs),
            ],
            out_specs=pl.BlockSpec((size, outs), lambda out, tile, layer, experts, num: (used_tile(tile, num), out)),
            scratch_shapes=scale_scratch(form, held[form.names[1]].shape[2], outs),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles * size, num_out), F32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(  # without weights: the number of experts with rows is not known here
            flops=2 * num_rows * num_in * num_out,
            transcendentals=0,
            bytes_accessed=x.size * x.dtype.itemsize + 4 * num_tiles * size * num_out,
        ),
        interpret=interpret,
        name=GROUPED_QUANTIZED_MATMUL,
    )
    stacks = [held[name] for name in form.names]
    if not interpret:  # otherwise XLA copies stacks that fit into VMEM there for each layer, with all layers in them
        stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
    y: jax.Array = run(layer.reshape(1), tiles.experts, tiles.num, x, *stacks)
    return y[tiles.places]


def _expert_specs(form: KernelForm, held: Mapping[str, jax.Array], outs: int) -> list[pl.BlockSpec]:
    """Returns a block spec for each array: what is fetched of a tile's expert, for `outs` outputs."""

    def block(name: str) -> pl.BlockSpec:
        shape = held[name].shape[2:]
        if name != "codes_by_input" and form.packing.rows > 1:  # there are few, fetched whole
            return pl.BlockSpec((1, 1, *shape), lambda _, tile, layer, experts, __: (layer[0], experts[tile], 0, 0))
        return pl.BlockSpec(
            (1, 1, shape[0], outs), lambda out, tile, layer, experts, _: (layer[0], experts[tile], 0, out)
        )

    return [block(name) for name in form.names]


def rows_of_a_tile(num_rows: int, num_experts: int) -> int:
    """Returns a power of two, within bounds: at least twice the mean number of rows of an expert."""
    mean = -(-num_rows // num_experts)
    return min(max(FEWEST_ROWS, 1 << (2 * mean - 1).bit_length()), MOST_ROWS)


def tiles_of(sizes: jax.Array, num_rows: int, size: int) -> Tiles:
    num_experts = sizes.shape[0]
    num_tiles = num_rows // size + min(num_experts, num_rows)
    tile_ends, row_ends = jnp.cumsum(-(-sizes // size)), jnp.cumsum(sizes)
    num = jnp.maximum(tile_ends[-1], 1)
    numbers = jnp.minimum(jnp.arange(num_tiles, dtype=I32), num - 1)
    experts = jnp.minimum(jnp.sum(tile_ends[None] <= numbers[:, None], axis=1, dtype=I32), num_experts - 1)
    # For each expert, the distance of its first row from its place.
    shifts = size * jnp.concatenate([jnp.zeros(1, I32), tile_ends[:-1]]) - (row_ends - sizes)
    places = jnp.arange(num_tiles * size, dtype=I32)
    sources = jnp.clip(places - jnp.repeat(shifts[experts], size), 0, num_rows - 1)
    row_numbers = jnp.arange(num_rows, dtype=I32)
    owners = jnp.minimum(jnp.sum(row_ends[None] <= row_numbers[:, None], axis=1), num_experts - 1)
    return Tiles(experts, num.reshape(1), sources, jnp.clip(row_numbers + shifts[owners], 0, num_tiles * size - 1))


def _kernel(form: KernelForm, layer: Ref, experts: Ref, num: Ref, x: Ref, *refs: Ref) -> None:
    del layer  # used by the block specs
    number, count = pl.program_id(1), len(form.names)
    codes, *held = (ref.at[0, 0] for ref in refs[:count])
    tile = Tile(form, codes, held, list(refs[count + 1 :]), pl.program_id(0) * codes.shape[1])

    @pl.when(number < num[0])
    def _() -> None:
        is_first = (number == 0) | (experts[number] != experts[jnp.maximum(number - 1, 0)])
        pl.when(is_first)(tile.load_scales)
        tile.multiply(x, refs[count])
