"""Matmuls with quantized weights by the CPU kernel in `penstock.engine.kernels.cpu`, in the panels that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from penstock.engine.formats.buffers import device_buffer
from penstock.engine.formats.packing import FLOATS, OFFSETS, PLANES, Packing
from penstock.engine.kernels.cpu import QUANTIZED_MATMUL, value_or_empty
from penstock.engine.models.layers.basic import Linear
from penstock.engine.models.layers.experts import GroupedLinear, RowGroups
from penstock.engine.models.layers.quantized import QuantizedEmbedding, QuantizedGroupedLinear, QuantizedLinear

Quantized = QuantizedLinear | QuantizedEmbedding | QuantizedGroupedLinear

OUTER_BYTES, SECOND_BYTE = np.uint32(0xFF0000FF), np.uint32(0xFF00)  # of a lane
OUTER_NIBBLES, SECOND_NIBBLES = np.uint32(0xF00FF00F), np.uint32(0x00F000F0)  # of its halves
MOST_FEATURES = 2**17  # the number of 8-bit products that fit into a 32-bit sum


def has_kernel(*layers: nnx.Module) -> bool:
    """Checks whether one call can compute the matmuls of all layers, side by side."""
    first = layers[0]
    if not isinstance(first, Quantized):
        return False
    alike = all(
        isinstance(layer, Quantized) and layer.packing == first.packing and layer.shape[1] == first.shape[1]
        for layer in layers
    )
    return alike and _is_supported(first.packing, first.shape[1])


def _is_supported(packing: Packing, num_in: int) -> bool:
    is_plain = packing.rows == 1 and not packing.super_group and not packing.has_order and packing.scale in FLOATS
    each = features_in_lane(packing)
    return (
        packing.code in ("int8", "int4")
        and is_plain
        and num_in <= MOST_FEATURES
        and num_in % (packing.group or each) == 0
        and (packing.group or each) % each == 0
    )


def features_in_lane(packing: Packing) -> int:
    """Returns the number of features in a lane of 32 bits."""
    return 32 // PLANES[packing.code][0]


class Panels(nnx.Module):
    """The weights of one or several matmuls side by side, each of one matrix or one per expert, in the kernel's layout.

    With a `gate` and two matmuls of the same shape, the kernel returns `activation(x @ first) * (x @ second)`.
    """

    def __init__(self, layers: Sequence[Quantized], width: int, *, gate: int = 0) -> None:
        self.packing = layers[0].packing
        self.splits = tuple(layer.shape[0] for layer in layers)
        self.gate = gate
        order = column_order(self.splits, width, gated=gate != 0)
        self.codes = nnx.Param(_packed_codes([_held(layer, "codes") for layer in layers], order, self.packing))
        dtype = np.dtype(self.packing.scale)
        self.scales = nnx.Param(_by_group([_held(layer, "scales") for layer in layers], order, dtype))
        offset = self.packing.offset
        offsets = None if offset == "none" else _by_group([_held(layer, offset) for layer in layers], order, dtype)
        self.offsets = None if offsets is None else nnx.Param(offsets)
        self.bias = _biases(layers, order)

    def multiply(self, x: jax.Array, dtype: DTypeLike, group_sizes: jax.Array | None = None) -> jax.Array:
        """Multiplies `x`, `[rows, in]`, by the weights; with `group_sizes`, rows are in the order of their experts."""
        num_rows, num_in = x.shape
        num_quantized = num_rows if self.packing.has_int8_activations else 0
        y, _, _ = QUANTIZED_MATMUL(
            {
                "x": x,
                "codes": self.codes[...],
                "scales": self.scales[...],
                "offsets": value_or_empty(self.offsets),
                "bias": value_or_empty(self.bias),
                "group_sizes": jnp.zeros((0,), jnp.int32) if group_sizes is None else group_sizes,
            },
            {
                "y": _result((num_rows, self.num_columns), dtype),
                "bytes": _result((num_quantized, num_in), jnp.uint8),
                "row_scales": _result((num_quantized,), jnp.float32),
            },
            bits=PLANES[self.packing.code][0],
            offset=OFFSETS.index(self.packing.offset),
            gate=self.gate,
        )
        return y

    @property
    def num_columns(self) -> int:
        return self.splits[0] if self.gate else sum(self.splits)

    def columns(self, numbers: jax.Array) -> jax.Array:
        """Returns columns of the weights, f32 `[len(numbers), in]`."""
        width = self.codes.shape[-1]
        at = numbers // width, slice(None), numbers % width
        codes = _unpacked(self.codes[...][at], self.packing)
        scales = self.scales[...][at].astype(jnp.float32)
        if self.offsets is not None and self.packing.offset == "zeros":
            codes = codes - _repeated(self.offsets[...][at].astype(jnp.float32), codes.shape[1])
        values = codes * _repeated(scales, codes.shape[1])
        if self.offsets is not None and self.packing.offset == "minimums":
            values = values - _repeated(self.offsets[...][at].astype(jnp.float32), codes.shape[1])
        return values


class PackedQuantizedLinear(Linear):
    """A PackedLinear with quantized weights."""

    is_native = True

    def __init__(self, width: int, *layers: QuantizedLinear, gate: int = 0) -> None:
        self.panels = Panels(layers, width, gate=gate)
        self.splits, self.gate = self.panels.splits, gate

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.panels.multiply(x, x.dtype)

    @property
    def num_columns(self) -> int:
        return self.panels.num_columns

    def wide(self, x: jax.Array) -> jax.Array:
        return self.panels.multiply(x, jnp.float32)


class PackedQuantizedEmbedding(QuantizedEmbedding):
    """A QuantizedEmbedding of a table that is the head too."""

    is_native = True

    def __init__(self, table: QuantizedEmbedding, width: int) -> None:
        self.panels, self.dtype = Panels([table], width), table.dtype

    def rows(self, token_ids: jax.Array) -> jax.Array:
        return self.panels.columns(token_ids).astype(self.dtype)

    def wide(self, x: jax.Array) -> jax.Array:
        return self.panels.multiply(x, jnp.float32)


class PackedQuantizedGroups(GroupedLinear):
    """A PackedGroups with quantized weights."""

    is_native = True

    def __init__(self, linears: Sequence[QuantizedGroupedLinear], width: int, *, gate: int = 0) -> None:
        self.panels, self.gate = Panels(linears, width, gate=gate), gate

    def __call__(self, rows: jax.Array, groups: RowGroups) -> jax.Array:
        return self.multiply(rows, groups.sizes, jnp.dtype(jnp.float32))

    def multiply(self, rows: jax.Array, group_sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.panels.multiply(rows, dtype, group_sizes)


def column_order(splits: Sequence[int], width: int, *, gated: bool) -> np.ndarray:
    """Returns, i64 `[panels, width]`, the column in each place of a panel, counted through all parts; -1 for none.

    If gated, half of each panel is from the first part and half from the second.
    """
    total = sum(splits)
    if not gated:
        return np.pad(np.arange(total), (0, -total % width), constant_values=-1).reshape(-1, width)
    half, size = width // 2, splits[0]
    first = np.pad(np.arange(size), (0, -size % half), constant_values=-1).reshape(-1, half)
    return np.concatenate([first, np.where(first < 0, -1, first + size)], axis=1)


def _packed_codes(parts: Sequence[np.ndarray], order: np.ndarray, packing: Packing) -> jax.Array:
    """Packs codes `[..., out, bytes]`, 4 bytes per lane, to u32 `[..., panels, lanes, width]`, a panel at a time."""
    lanes = [part.view("<u4") for part in parts]
    *leading, _, depth = lanes[0].shape
    packed = device_buffer((*leading, order.shape[0], depth, order.shape[1]), np.dtype(np.uint32))
    for place in np.ndindex(*leading):
        for panel, columns in enumerate(order):
            rows = _rows([part[place] for part in lanes], columns)
            packed[(*place, panel)] = _in_halves(rows, packing).T
    return _on_device(packed)


def _by_group(parts: Sequence[np.ndarray], order: np.ndarray, dtype: np.dtype) -> jax.Array:
    """Packs `[..., out, groups]` to `[..., panels, groups, width]`."""
    *leading, _, groups = parts[0].shape
    packed = device_buffer((*leading, order.shape[0], groups, order.shape[1]), dtype)
    for place in np.ndindex(*leading):
        for panel, columns in enumerate(order):
            packed[(*place, panel)] = _rows([part[place] for part in parts], columns).T
    return _on_device(packed)


def _rows(parts: Sequence[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """Returns rows by number, counted through all parts; zeros for -1."""
    rows = np.zeros((len(numbers), *parts[0].shape[1:]), parts[0].dtype)
    first = 0
    for part in parts:
        own = (numbers >= first) & (numbers < first + len(part))
        rows[own] = part[numbers[own] - first]
        first += len(part)
    return rows


def _in_halves(lanes: Any, packing: Packing) -> Any:
    """Reorders codes, the first of which is in the low bits: those of even features go to the low half. `_in_order`
    undoes it.
    """
    return _swapped(_swapped_nibbles(lanes) if packing.code == "int4" else lanes)


def _in_order(lanes: Any, packing: Packing) -> Any:
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
    codes: jax.Array = (_in_order(lanes, packing)[..., None] >> shifts).astype(jnp.uint8).reshape(lanes.shape[0], -1)
    if bits == 8:
        return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    values = (codes & 15).astype(jnp.float32)
    return values - 8 if packing.offset == "none" else values


def _repeated(groups: jax.Array, size: int) -> jax.Array:
    return jnp.repeat(groups, size // groups.shape[1], axis=1)


def _held(layer: Quantized, name: str) -> np.ndarray:
    return np.asarray(getattr(layer, name)[...])


def _biases(layers: Sequence[Quantized], order: np.ndarray) -> nnx.Param[jax.Array] | None:
    """Returns biases, f32 `[..., panels * width]`."""
    held = [getattr(layer, "bias", None) for layer in layers]
    found = next((bias for bias in held if bias is not None), None)
    if found is None:
        return None
    leading = found.shape[:-1]
    parts = [
        np.zeros((*leading, layer.shape[0]), np.float32) if bias is None else np.asarray(bias[...], np.float32)
        for layer, bias in zip(layers, held, strict=True)
    ]
    row = np.concatenate([*parts, np.zeros((*leading, 1), np.float32)], axis=-1)  # index -1 is the last
    return nnx.Param(jnp.asarray(row[..., order.reshape(-1)]))


def _on_device(array: np.ndarray) -> jax.Array:
    placed: jax.Array = jax.device_put(array)
    return placed


def _result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
