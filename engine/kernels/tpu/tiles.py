"""Multiplies a tile of a quantized weight in VMEM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import LANES, LANES_AT_ONCE, ROWS
from penstock.engine.kernels.tpu.unpacking import f32_of, spread, spread_column, values_of

F32, BF16 = jnp.float32, jnp.bfloat16
TILE_BYTES = 2**20  # of codes; the first one is fetched before anything is computed


def scale_lanes(num_rows: int) -> int:
    """Returns the lanes of scales for `num_rows` rows of a tile: they come in whole tiles of memory."""
    return -(-num_rows // LANES) * LANES


def tile_rows(num_out: int, num_lanes: int) -> int:
    """Returns the rows of a tile of codes: all if there are few, otherwise a multiple of ROWS."""
    most = max(TILE_BYTES // num_lanes // ROWS, 1) * ROWS
    return num_out if num_out <= ROWS else min(most, num_out // ROWS * ROWS)


def multiply_tile(
    packing: Packing,
    x: Ref,  # bf16 [planes, tokens, lanes]
    codes: Ref,  # [rows, lanes]
    scales: Ref,  # [groups, rows], or [groups, blocks] for all blocks of rows; either axis may be padded
    offsets: Ref | None,  # [groups, rows]
    out: Ref,  # f32 [tokens, rows]
    first: Any,  # i32: the weight's row that is first in the tile
) -> None:
    """Multiplies some rows of the tile at a time."""
    size = min(ROWS, codes.shape[0])
    count = codes.shape[0] // size

    def piece(number: Any, _: None) -> None:
        start = number * size
        rows = pl.ds(start if count == 1 else pl.multiple_of(start, size), size)
        if packing.rows > 1:
            tile = _Tile(packing, x, codes.at[rows], scales, block=lax.div(first + start, packing.rows))
        else:
            tile = _Tile(
                packing, x, codes.at[rows], scales.at[:, rows], None if offsets is None else offsets.at[:, rows]
            )
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
    block: Any = None  # i32: the rows' block, if there are scales for blocks

    @property
    def group_lanes(self) -> int:
        return int(self.packing.group // self.x.shape[0])

    def product(self) -> jax.Array:
        """Returns f32 [tokens, rows]."""
        total: Any = sum(
            self._unpack_lanes(start, min(LANES_AT_ONCE, self.codes.shape[1] - start))
            for start in range(0, self.codes.shape[1], LANES_AT_ONCE)
        )
        scaled: jax.Array = total if self.packing.group else self._scaled(total)
        return scaled

    def _unpack_lanes(self, start: int, num_lanes: int) -> Any:
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
        """Applies the scale and offset of each row of the weight, `[1, rows]`."""
        scales = f32_of(self.packing, self.scales[:1])
        if self.offsets is None:
            return total * scales
        sums: Any = sum(jnp.sum(self.x[plane].astype(F32), axis=1, keepdims=True) for plane in range(self.x.shape[0]))
        offsets: jax.Array = sums * f32_of(self.packing, self.offsets[:1])
        return (total - offsets) * scales if self.packing.offset == "zeros" else total * scales - offsets
