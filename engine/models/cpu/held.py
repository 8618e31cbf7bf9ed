"""Weights in the panels that the CPU's kernels read (`penstock.engine.kernels.cpu`), and the calls of these kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from penstock.engine.formats.packing import OFFSETS, PLANES, Packing
from penstock.engine.kernels.cpu import GROUPED_MATMUL, MATMUL, QUANTIZED_MATMUL, value_or_empty
from penstock.engine.kernels.cpu.layout import GATE_NAMES
from penstock.engine.models.layers.linear import Arrays, Held, RowGroups

NOT_GATED = GATE_NAMES.index("none")

OUTER_BYTES, SECOND_BYTE = np.uint32(0xFF0000FF), np.uint32(0xFF00)  # of a lane
OUTER_NIBBLES, SECOND_NIBBLES = np.uint32(0xF00FF00F), np.uint32(0x00F000F0)  # of its halves


@dataclass(frozen=True)
class Panels(Held):
    """Weights of one or several matmuls side by side, in panels of as many columns as a kernel reads at once.

    With a `gate` and two matmuls of the same shape, the result is `activation(x @ first) * (x @ second)`.
    """

    splits: tuple[int, ...]  # columns of each result
    gate: int

    is_native = True

    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        return self.multiply_first(x, arrays, bias, dtype, _all_rows())

    def multiply_first(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, num_rows: jax.Array
    ) -> jax.Array:
        operands = {"x": x, "weights": arrays["weights"], "bias": value_or_empty(bias), "num_rows": num_rows}
        return MATMUL(operands, {"y": self._result(x, dtype)}, gate=self.gate)[0]

    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        bias = value_or_empty(bias)
        operands = {"x": rows, "weights": arrays["weights"], "bias": bias, "group_sizes": groups.sizes}
        return GROUPED_MATMUL(operands, {"y": self._result(rows, dtype)}, gate=self.gate)[0]

    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        width = arrays["weights"].shape[2]
        found = arrays["weights"][numbers // width, :, numbers % width]  # bf16 has an axis for pairs
        return found.reshape(len(numbers), -1)

    def split(self, y: jax.Array) -> list[jax.Array]:
        return jnp.split(y, np.cumsum(self.splits[:-1]).tolist(), axis=1) if len(self.splits) > 1 else [y]

    def operands(self, arrays: Arrays, bias: jax.Array | None) -> dict[str, jax.Array]:
        """Returns the operands of a `Linear` in the table of kernels."""
        none = value_or_empty(None)
        return {"weights": arrays["weights"], "scales": none, "offsets": none, "bias": value_or_empty(bias)}

    def numbers(self, name: str) -> dict[str, Any]:
        """Returns the attributes of a kernel that takes it as `name`."""
        return {f"{name}_offset": OFFSETS.index("none"), f"{name}_reads_bytes": False}

    @property
    def num_columns(self) -> int:
        return sum(self.splits)

    def _result(self, x: jax.Array, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return result((x.shape[0], self.num_columns), dtype)


@dataclass(frozen=True)
class QuantizedPanels(Panels):
    """Quantized weights in panels; the kernel unpacks each where it is used."""

    packing: Packing

    def multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, layer: jax.Array | None
    ) -> jax.Array:
        return self._multiply(x, arrays, bias, dtype, _all_rows())

    def multiply_first(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, num_rows: jax.Array
    ) -> jax.Array:
        return self._multiply(x, arrays, bias, dtype, num_rows)

    def multiply_groups(
        self, rows: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, groups: RowGroups
    ) -> jax.Array:
        return self._multiply(rows, arrays, bias, dtype, groups.sizes)

    def _multiply(
        self, x: jax.Array, arrays: Arrays, bias: jax.Array | None, dtype: DTypeLike, group_sizes: jax.Array
    ) -> jax.Array:
        num_rows, num_in = x.shape
        num_quantized = num_rows if self.packing.has_int8_activations else 0
        has_sums = self.packing.code == "int4" or self.packing.offset != "none"
        y, _, _, _ = QUANTIZED_MATMUL(
            {
                "x": x,
                "codes": arrays["codes"],
                "scales": arrays["scales"],
                "offsets": value_or_empty(arrays.get("offsets")),
                "bias": value_or_empty(bias),
                "group_sizes": group_sizes,
            },
            {
                "y": self._result(x, dtype),
                "bytes": result((num_quantized, num_in), jnp.uint8),
                "row_scales": result((num_quantized,), jnp.float32),
                "row_sums": result((num_quantized * has_sums, arrays["scales"].shape[-2]), jnp.int32),
            },
            bits=PLANES[self.packing.code][0],
            offset=OFFSETS.index(self.packing.offset),
            gate=self.gate,
        )
        return y

    def columns(self, numbers: jax.Array, arrays: Arrays) -> jax.Array:
        """Returns columns in f32."""
        width = arrays["codes"].shape[-1]
        at = numbers // width, slice(None), numbers % width
        codes = _unpacked(arrays["codes"][at], self.packing)

        def repeated(name: str) -> jax.Array:
            groups = arrays[name][at].astype(jnp.float32)
            return jnp.repeat(groups, codes.shape[1] // groups.shape[1], axis=1)

        if self.packing.offset == "zeros":
            codes = codes - repeated("offsets")
        values = codes * repeated("scales")
        return values - repeated("offsets") if self.packing.offset == "minimums" else values

    def operands(self, arrays: Arrays, bias: jax.Array | None) -> dict[str, jax.Array]:
        offsets = value_or_empty(arrays.get("offsets"))
        return {
            "weights": arrays["codes"], "scales": arrays["scales"], "offsets": offsets, "bias": value_or_empty(bias),
        }  # fmt: skip

    def numbers(self, name: str) -> dict[str, Any]:
        offset = OFFSETS.index(self.packing.offset)
        return {f"{name}_offset": offset, f"{name}_reads_bytes": self.packing.has_int8_activations}


def splits_of(sizes: Sequence[int], gate: int) -> tuple[int, ...]:
    """Returns the columns of each result, from those of each weight."""
    return tuple(sizes) if gate == NOT_GATED else (sizes[0],)


def _all_rows() -> jax.Array:
    """Returns the empty array that tells kernels to multiply all rows."""
    return jnp.zeros((0,), jnp.int32)


def result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def in_halves(lanes: Any, packing: Packing) -> Any:
    """Reorders codes whose first is in the low bits: those of even features go to the low half. `_reordered`
    undoes it.
    """
    return _swapped(_swapped_nibbles(lanes) if packing.code == "int4" else lanes)


def _reordered(lanes: Any, packing: Packing) -> Any:
    swapped = _swapped(lanes)
    return _swapped_nibbles(swapped) if packing.code == "int4" else swapped


def _swapped(lanes: Any) -> Any:
    """Swaps the two middle bytes."""
    return (lanes & OUTER_BYTES) | ((lanes & SECOND_BYTE) << 8) | ((lanes >> 8) & SECOND_BYTE)


def _swapped_nibbles(lanes: Any) -> Any:
    """Swaps the two middle nibbles of each half."""
    return (lanes & OUTER_NIBBLES) | ((lanes & SECOND_NIBBLES) << 4) | ((lanes >> 4) & SECOND_NIBBLES)


def _unpacked(lanes: jax.Array, packing: Packing) -> jax.Array:
    """Unpacks u32 `[rows, lanes]` to codes, f32 `[rows, in]`, with constant zero points subtracted."""
    bits = PLANES[packing.code][0]
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)
    codes: jax.Array = (_reordered(lanes, packing)[..., None] >> shifts).astype(jnp.uint8).reshape(lanes.shape[0], -1)
    if bits == 8:
        return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    values = (codes & 15).astype(jnp.float32)
    return values - 8 if packing.offset == "none" else values
