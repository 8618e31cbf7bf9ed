"""Packs quantized weights into the panels that the CPU's kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import numpy as np

from penstock.engine.formats.buffers import device_buffer
from penstock.engine.formats.packing import FLOATS, INTEGERS, PLANES, Packing
from penstock.engine.models.cpu.held import NOT_GATED, QuantizedPanels, in_halves, splits_of
from penstock.engine.models.layers.linear import Weight
from penstock.engine.models.layers.quantized import Quantized

MOST_FEATURES = 2**17  # the number of 8-bit products that fit into a 32-bit sum


def has_kernel(*weights: Weight) -> bool:
    """Checks whether one call can compute these matmuls side by side."""
    first = weights[0].held
    if not isinstance(first, Quantized):
        return False
    alike = all(
        isinstance(held, Quantized) and held.packing == first.packing and held.shape[1] == first.shape[1]
        for held in (weight.held for weight in weights)
    )
    return alike and _is_supported(first.packing, first.shape[1])


def _is_supported(packing: Packing, num_in: int) -> bool:
    is_plain = packing.rows == 1 and not packing.super_group and not packing.has_order and packing.scale in FLOATS
    each = features_in_lane(packing)
    return (
        packing.code in INTEGERS
        and is_plain
        and num_in <= MOST_FEATURES
        and num_in % (packing.group or each) == 0
        and (packing.group or each) % each == 0
    )


def features_in_lane(packing: Packing) -> int:
    """Returns the number of features in a lane of 32 bits."""
    return 32 // PLANES[packing.code][0]


def quantized_panels(weights: Sequence[Weight], width: int, gate: int) -> tuple[QuantizedPanels, dict[str, jax.Array]]:
    """Packs the weights of matmuls side by side, each one weight or one per expert."""
    held = [cast("Quantized", weight.held) for weight in weights]
    packing, sizes = held[0].packing, [each.shape[0] for each in held]
    order = column_order(sizes, width, gated=gate != NOT_GATED)
    dtype = np.dtype(packing.scale)
    arrays = {
        "codes": _packed_codes(_leaves(weights, "codes"), order, packing),
        "scales": _pack_groups(_leaves(weights, "scales"), order, dtype),
    }
    if packing.offset != "none":
        arrays["offsets"] = _pack_groups(_leaves(weights, packing.offset), order, dtype)
    return QuantizedPanels(splits_of(sizes, gate), gate, packing), arrays


def column_order(splits: Sequence[int], width: int, *, gated: bool) -> np.ndarray:
    """Returns the number of the column in each place of each panel: i64 `[panels, width]`; -1: none.

    Columns are counted through all parts. If gated, half of each panel is from the first part and half from the second.
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
            packed[(*place, panel)] = in_halves(rows, packing).T
    return _on_device(packed)


def _pack_groups(parts: Sequence[np.ndarray], order: np.ndarray, dtype: np.dtype) -> jax.Array:
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


def _leaves(weights: Sequence[Weight], name: str) -> list[np.ndarray]:
    return [np.asarray(getattr(weight, name)[...]) for weight in weights]


def _on_device(array: np.ndarray) -> jax.Array:
    placed: jax.Array = jax.device_put(array)
    return placed
