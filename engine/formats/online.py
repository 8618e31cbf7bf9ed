"""Quantization while loading, for weights that are stored as floats: rounded to nearest, without calibration.

| kind | held as |
| --- | --- |
| int8 | a scale for each output feature: its largest weight over 127 |
| int4 | groups of 32, each with a scale and a minimum that reach from its least weight, or 0, to its largest |
| fp8 | float8_e4m3fn in blocks of 128 x 128, each with a scale: its largest weight over 448 |

Codes are computed with the scales as held, so that rounding a scale does not add to the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import ml_dtypes
import numpy as np

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.bits import pack
from penstock.engine.formats.packing import ONLINE_KINDS, Packing
from penstock.engine.formats.tensor_mapping import FLOAT_KINDS, Leaf, TensorHeader

LARGEST_F16 = 65504.0
AT_ONCE = 2**18  # weights that are in f32 at once, in several copies


@dataclass(frozen=True, slots=True)
class OnlineQuantization:
    """Quantization while loading. `kind` is what weights become; None: what the model's config already says."""

    kind: str | None = None
    passed_over: tuple[str, ...] = ()

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        header = stored.get(_tensor(module, stored))
        if header is None or header.kind not in FLOAT_KINDS:
            return None
        return self.expected(module, header.shape[-1], "")

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        if self.kind is None:
            return None
        packing = ONLINE_KINDS[self.kind]
        size = packing.group if packing.code == "int4" else 1
        return None if num_in % size else packing

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        suffix = _tensor(module, stored).removeprefix(module)
        rows, columns = ONLINE_KINDS[packing.code].rows, packing.group or num_in  # also if scales are held by row
        held = {"int8": columns, "int4": columns // 2, "fp8": columns}[packing.code]
        leaf = partial(Leaf, suffix, (num_out, num_in), tuple(FLOAT_KINDS), stored_block=(rows, columns))
        made = dict(_MADE[packing.code])
        if rows > packing.rows:
            made["scales"] = _fp8_scales_by_row
        return {
            name: leaf(
                block=(rows, held) if name == "codes" else (rows // packing.rows, 1), convert=_by_rows(convert, rows)
            )
            for name, convert in made.items()
        }

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        return ()


def _tensor(module: str, stored: Mapping[str, TensorHeader]) -> str:
    """Returns the tensor's name: a layer's experts in one tensor have no `.weight` suffix."""
    return f"{module}.weight" if f"{module}.weight" in stored else module


def _by_rows(convert: Callable[[np.ndarray], np.ndarray], rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """Converts a few rows at a time, so that little is in memory besides the stored and the converted weights."""

    def converted(weights: np.ndarray) -> np.ndarray:
        at_once = rows * max(1, AT_ONCE // (rows * max(1, weights.shape[-1])))
        flat = weights.reshape(-1, *weights.shape[-2:])
        parts = [
            np.concatenate([convert(_finite(one[at : at + at_once])) for at in range(0, len(one), at_once)])
            for one in flat
        ]
        return np.stack(parts).reshape(*weights.shape[:-2], *parts[0].shape)

    return converted


def _finite(weights: np.ndarray) -> np.ndarray:
    values = weights.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError("has weights that are not finite")
    return values


def _divided(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Divides, with 0 where a scale is 0: the weights are 0, or too small to be held."""
    return np.asarray(np.divide(values, scales, out=np.zeros_like(values), where=scales > 0))


def _int8_scales(weights: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(weights).max(axis=1, keepdims=True) / np.float32(127))


def _int8_codes(weights: np.ndarray) -> np.ndarray:
    return np.asarray(np.rint(_divided(weights, _int8_scales(weights))).clip(-127, 127).astype(np.int8))


def _int4_minimums(weights: np.ndarray) -> np.ndarray:
    """Returns what is subtracted: the least weight, or 0, with its sign changed."""
    least = weights.reshape(len(weights), -1, 32).min(axis=2)
    return np.asarray(-np.minimum(least, 0).clip(-LARGEST_F16).astype(np.float16))


def _int4_scales(weights: np.ndarray) -> np.ndarray:
    largest = weights.reshape(len(weights), -1, 32).max(axis=2)
    size = (largest + _int4_minimums(weights).astype(np.float32)).clip(0, LARGEST_F16)
    return np.asarray((size / np.float32(15)).astype(np.float16))


def _int4_codes(weights: np.ndarray) -> np.ndarray:
    groups = weights.reshape(len(weights), -1, 32)
    minimums, scales = (made(weights).astype(np.float32)[..., None] for made in (_int4_minimums, _int4_scales))
    codes = np.rint(_divided(groups + minimums, scales)).clip(0, 15).astype(np.uint8)
    return pack(codes.reshape(weights.shape), 4)


def _blocks(weights: np.ndarray) -> np.ndarray:
    """Returns f32 `[out blocks, 128, in blocks, 128]`, with partial blocks filled with 0."""
    padded = np.pad(weights, [(0, -size % 128) for size in weights.shape])
    return padded.reshape(padded.shape[0] // 128, 128, -1, 128)


def _fp8_scales(weights: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(_blocks(weights)).max(axis=(1, 3)) / np.float32(448))


def _fp8_scales_by_row(weights: np.ndarray) -> np.ndarray:
    return np.repeat(_fp8_scales(weights), 128, axis=0)


def _fp8_codes(weights: np.ndarray) -> np.ndarray:
    scales = np.repeat(np.repeat(_fp8_scales(weights), 128, axis=0), 128, axis=1)
    scaled = _divided(weights, scales[: weights.shape[0], : weights.shape[1]])
    return np.asarray(scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)).view(np.uint8)


_MADE: Mapping[str, Mapping[str, Callable[[np.ndarray], np.ndarray]]] = MappingProxyType(
    {
        "int8": {"codes": _int8_codes, "scales": _int8_scales},
        "int4": {"codes": _int4_codes, "scales": _int4_scales, "minimums": _int4_minimums},
        "fp8": {"codes": _fp8_codes, "scales": _fp8_scales},
    }
)
