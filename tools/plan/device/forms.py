"""The forms of quantized weights that the table of schedules has, by the names that its rows use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax

from penstock.engine.formats.packing import Packing, leaf_shapes
from penstock.engine.kernels.tpu import LANES, KernelForm
from penstock.engine.kernels.tpu.form import SUBLANES

FORMS = {
    "int4 of 32, float16": Packing("int4", 32, scale="float16"),
    "int4 of 32, minimums, float16": Packing("int4", 32, scale="float16", offset="minimums"),
    "int4 of 128, zeros, float16": Packing("int4", 128, scale="float16", offset="zeros"),
    "int4 of 128, zeros, bfloat16": Packing("int4", 128, scale="bfloat16", offset="zeros"),
    "int8 of 32, float16": Packing("int8", 32, scale="float16"),
    "int8 of rows": Packing("int8", 0),
    "fp8 of rows": Packing("fp8", 0, scale="bfloat16"),
    "fp8 of 128 x 128": Packing("fp8", 128, rows=128),
    "mxfp4": Packing("fp4", 32, scale="e8m0"),
}
_TYPES = {"int8": "s8", "uint8": "u8", "int16": "s16", "bfloat16": "bf16", "float32": "f32"}
"""In HLO, of what is held."""

Arrays = Sequence[tuple[str, tuple[int, int]]]
"""Type, as in HLO, and shape `[rows, lanes]` of codes, scales and offsets, as a kernel is given them."""


def form_of(arrays: Arrays, num_in: int) -> str | None:
    """Returns the name of the form of a weight with so many inputs, padding included; None if no row has it."""
    return next((name for name, packing in FORMS.items() if _is_held(packing, arrays, num_in)), None)


def _is_held(packing: Packing, arrays: Arrays, num_in: int) -> bool:
    (_, (code_rows, outs)), (_, (num_groups, scale_lanes)) = arrays[:2]
    groups = -(-num_in // packing.group) if packing.group else 1
    return (
        tuple(kind for kind, _ in arrays) in _types(packing)
        and num_in == code_rows * KernelForm(packing).num_planes
        and 0 <= -(-groups // SUBLANES) * SUBLANES - num_groups <= SUBLANES  # inputs may have more padding than groups
        and (packing.rows > 1) == (scale_lanes < outs)
    )


@cache
def _types(packing: Packing) -> tuple[tuple[str, ...], ...]:
    """Returns the types of the arrays on each kind of chip."""
    shapes = leaf_shapes(packing, LANES, _INPUTS).items()
    leaves = {name: jax.ShapeDtypeStruct(shape, kind) for name, (shape, kind) in shapes}
    held = [KernelForm(packing, has_bf16=has_bf16).shapes(leaves).values() for has_bf16 in (False, True)]
    return tuple(tuple(_TYPES[str(array.dtype)] for array in arrays) for arrays in held)


_INPUTS = 1024  # whole groups of every form
