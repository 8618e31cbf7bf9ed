"""Multiplies by a tile of a quantized weight in VMEM.

Inputs are on the sublanes and outputs on the lanes, so a group's scales are one row, which repeats for its inputs.
Weights are rounded once, to bfloat16, and products are summed in f32, as when XLA unpacks them. With one scale for the
whole input the sum is scaled instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.kernels.pallas import Ref
from penstock.engine.kernels.tpu.form import BF16_ROWS, LANES, KernelForm
from penstock.engine.kernels.tpu.unpacking import offsets_of, pair_of, scales_of, values_of

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
TILE_BYTES = 2**20  # of codes; the first one is fetched before anything is computed
OUTPUTS_AT_ONCE = 256  # a matrix unit's width
INPUTS_AT_ONCE = 2048  # unpacked in one block of code, or twice as many; whole groups of each supported size


def tile_outputs(num_rows: int, num_lanes: int) -> int:
    """Returns the outputs of a tile of codes `[num_rows, num_lanes]`: all, or a multiple of OUTPUTS_AT_ONCE."""
    most = max(TILE_BYTES // num_rows // OUTPUTS_AT_ONCE, 1) * OUTPUTS_AT_ONCE
    return min(num_lanes, most)


def scale_scratch(form: KernelForm, num_groups: int, num_outputs: int) -> list[Any]:
    """Returns the scratch of a Tile's `rows`."""
    if form.packing.group == 0:
        return []
    kind = I32 if form.is_scaled_in_bf16 else F32
    num = len(form.names[1:]) + form.has_pairs
    return [pltpu.VMEM((num_outputs // LANES, num_groups, LANES), kind) for _ in range(num)]


@dataclass(frozen=True, slots=True)
class Tile:
    """All inputs of some outputs of a weight, as references into VMEM."""

    form: KernelForm
    codes: Ref  # [rows, outputs]
    held: list[Ref]  # scales and offsets: [groups, outputs], or [groups, blocks] of all blocks of outputs; padded
    # [outputs / LANES, groups, LANES]: what `load_scales` makes of `held`, if there are groups; f32, or two equal
    # bfloat16 as an i32; two for a scale that is a pair
    rows: list[Ref]
    first: Any  # i32: the weight's output that is first in the tile

    @property
    def num_inputs(self) -> int:
        return int(self.codes.shape[0]) * self.form.num_planes

    def load_scales(self) -> None:
        """Converts scales and offsets: once for a tile, whatever multiplies by it."""
        if not self.rows:
            return
        for number in range(self.rows[0].shape[0]):
            for rows, made in zip(self.rows, self._rows(number), strict=True):
                rows[number] = made

    def _rows(self, number: int) -> Iterator[jax.Array]:
        """Yields the contents of each of `rows` for LANES outputs."""
        form, (scales, *offsets) = self.form, self.held
        lanes = slice(number * LANES, (number + 1) * LANES)
        if form.has_pairs:
            yield from map(self._row, pair_of(form, scales_of(form, scales[:, lanes])))
        elif form.packing.rows > 1:
            block = lax.div(self.first + number * LANES, form.packing.rows)
            column = _column(scales_of(form, scales[...]), block)
            yield self._row(jnp.broadcast_to(column, self.rows[0].shape[1:]))
        else:
            yield self._row(scales_of(form, scales[:, lanes]))
        for held in offsets:
            yield self._row(offsets_of(form, held[:, lanes]))

    def _row(self, x: jax.Array) -> jax.Array:
        """Converts f32 to the form that `rows` have."""
        if not self.form.is_scaled_in_bf16:
            return x
        bits = lax.bitcast_convert_type(x, I32)  # of a bfloat16, and zeros
        return bits | lax.shift_right_logical(bits, I32(16))

    def multiply(
        self,
        x: Ref,  # bf16 [tokens, inputs]
        out: Ref,  # f32 [tokens, outputs]
    ) -> None:
        """Multiplies by the tile, some outputs and some inputs at a time."""
        width = OUTPUTS_AT_ONCE if self.codes.shape[1] % OUTPUTS_AT_ONCE == 0 else LANES
        num = self.codes.shape[1] // width
        in_a_row = 2 if self._has_long_blocks and num % 2 == 0 else 1

        def outputs(number: Any, _: None) -> None:
            for place in range(in_a_row):
                first = pl.multiple_of((number * in_a_row + place) * width, width)
                self._multiply(x, out, pl.ds(first, width))

        lax.fori_loop(0, num // in_a_row, outputs, None)

    @property
    def _has_long_blocks(self) -> bool:
        """Whether blocks of code are twice as long and as wide.

        Matrix units wait at the end of each block. But units of 128 x 128, which chips without bfloat16 have, gain more
        from less code than from fewer ends.
        """
        return self.form.has_bf16

    def _multiply(self, x: Ref, out: Ref, lanes: Any) -> None:
        inputs = INPUTS_AT_ONCE * (2 if self._has_long_blocks else 1)
        whole, rest = divmod(self.num_inputs, inputs)

        def add(start: Any, size: int) -> None:
            out[:, lanes] += self._product(x, lanes, start, size)

        def chunk(number: Any, _: None) -> None:
            add(pl.multiple_of(number * inputs, inputs), inputs)

        out[:, lanes] = self._product(x, lanes, 0, min(inputs, self.num_inputs))
        if whole > 1:
            lax.fori_loop(1, whole, chunk, None)
        if whole and rest:
            add(whole * inputs, rest)
        if self.form.packing.group == 0:
            out[:, lanes] = self._scaled(x, out[:, lanes], lanes)

    def _product(self, x: Ref, lanes: Any, start: Any, size: int) -> jax.Array:
        """Returns the product with `size` inputs from `start` on: f32 [tokens, lanes]."""
        planes = self.form.num_planes
        codes = self.codes[pl.ds(_quotient(start, planes), size // planes), lanes]
        weights = self._weights(values_of(self.form, codes), lanes, start)
        y: jax.Array = jnp.dot(x[:, pl.ds(start, size)], weights.astype(BF16), preferred_element_type=F32)
        return y

    def _weights(self, values: jax.Array, lanes: Any, start: Any) -> jax.Array:
        group = self.form.packing.group
        if group == 0:
            return values
        size, width = values.shape

        def spread(rows: Ref) -> jax.Array:
            """Loads each group's row into all sublanes, which costs the vector units nothing."""
            first, column = _quotient(start, group), _quotient(lanes.start, LANES)
            columns = []
            for number in range(width // LANES):
                parts = []
                for place in range(0, size, group):
                    row = rows[column + number, pl.ds(first + place // group, 1)]
                    count = min(group, size - place)
                    if self.form.is_scaled_in_bf16:
                        pair = pltpu.bitcast(jnp.broadcast_to(row, (BF16_ROWS // 2, LANES)), BF16)
                        parts += [pair] * (count // BF16_ROWS)
                    else:
                        parts.append(jnp.broadcast_to(row, (count, LANES)))
                columns.append(jnp.concatenate(parts, axis=0))
            return jnp.concatenate(columns, axis=1)

        scales, *others = self.rows
        if self.form.packing.offset == "zeros":
            values = values - spread(others.pop())
        weights = values * spread(scales)
        smaller = values * spread(others[0]) if self.form.has_pairs else None
        if self.form.packing.offset == "minimums":
            minimums = spread(others[-1])
            return weights - (minimums if smaller is None else minimums - smaller)
        return weights if smaller is None else weights + smaller

    def _scaled(self, x: Ref, total: jax.Array, lanes: Any) -> jax.Array:
        """Applies the scale and offset of each output, `[1, outputs]`."""
        scales, *offsets = (held[:1, lanes] for held in self.held)
        factors = scales_of(self.form, scales)
        if not offsets:
            return total * factors
        sums: Any = jnp.sum(x[...].astype(F32), axis=1, keepdims=True)
        subtracted: jax.Array = sums * offsets_of(self.form, offsets[0])
        if self.form.packing.offset == "zeros":
            return (total - subtracted) * factors
        return total * factors - subtracted


def _quotient(start: Any, size: int) -> Any:
    """Divides a multiple of `size`; `//` on a traced number would also handle negative ones."""
    return start // size if isinstance(start, int) else lax.div(start, size)


def _column(array: jax.Array, number: Any) -> jax.Array:
    """Returns one column of f32 `[rows, columns]`, as `[rows, 1]`. There may be NaN in the others."""
    is_it = lax.broadcasted_iota(jnp.int32, array.shape, 1) == number
    return jnp.sum(jnp.where(is_it, array, 0.0), axis=1, keepdims=True)
