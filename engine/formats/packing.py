"""The forms in which quantized weights are held: a small closed set that represents every stored value exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.engine.errors import ConfigError

# The number of a code's bits in each of the arrays that hold it: the low bits are in the first.
PLANES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"int8": (8,), "int6": (4, 2), "int5": (4, 1), "int4": (4,), "fp8": (8,), "fp4": (4,)}
)
# What is subtracted from a code if a weight has no zeros of its own: small codes are held without a sign.
ZERO: Mapping[str, int] = MappingProxyType({"int8": 0, "int6": 32, "int5": 16, "int4": 8})
INTEGERS = ("int8", "int4")
"""Codes that can be multiplied by activations in int8."""
GROUPS = (0, 16, 32, 64, 128)
FLOATS = ("float32", "float16", "bfloat16")
LEAVES = (
    "codes",
    "high_bits",
    "scales",
    "zeros",
    "minimums",
    "super_scales",
    "super_minimums",
    "group_of",
)
# Names of the arrays that are held with inputs or their groups before outputs, as the TPU kernels take them.
INPUT_FIRST: Mapping[str, str] = MappingProxyType(
    {
        "codes": "codes_by_input",
        "scales": "scales_by_group",
        "zeros": "zeros_by_group",
        "minimums": "minimums_by_group",
    }
)
SCALES = (*FLOATS, "int8", "uint8", "e8m0")
OFFSETS = ("none", "zeros", "minimums")


@dataclass(frozen=True, slots=True)
class Packing:
    """The form of a weight `[out, in]`, as arrays that `leaf_shapes` names. An element of the weight is one of

        scale * (code - zero)           with `zeros`, or with the constant of ZERO
        scale * code - minimum          with `minimums`
        scale * code                    with fp8 and fp4

    in f32, rounded once to the type of the activations. A scale is the stored value, or with a `super_group` the
    stored integer times the super group's scale; minimums are made like scales.

    Raises:
        ConfigError: there is no such form.
    """

    code: str  # int8, int6, int5, int4; fp8 is float8_e4m3fn, fp4 is float4_e2m1fn
    group: int  # input features that share a scale; 0: all of them
    rows: int = 1  # output features that share a scale; 0: all of them
    scale: str = "float32"  # the type of scales; e8m0: a power of two
    offset: str = "none"
    super_group: int = 0  # input features that share a scale of scales, a float16; 0: there is none
    has_order: bool = False  # whether each feature states its group
    has_int8_activations: bool = False  # whether activations are quantized as well, token by token

    def __post_init__(self) -> None:
        is_integer, has_super = self.code in ZERO, self.super_group > 0
        possible = (
            self.code in PLANES
            and self.scale in SCALES
            and self.offset in OFFSETS
            and self.group >= 0
            and (is_integer or self.offset == "none")
            and (is_integer or not self.has_order)
            and (self.code in INTEGERS or not self.has_int8_activations)
            and (self.rows == 1 or (self.code == "fp8" and self.rows >= 0))
            and (self.group in GROUPS or self.code == "fp8")
            and (self.scale == "e8m0") == (self.code == "fp4")
            and (self.scale in ("int8", "uint8")) == has_super
            and (not has_super or (self.group > 0 and self.super_group % self.group == 0))
        )
        if not possible:
            raise ConfigError(f"weights cannot be held as {self}")

    def num_groups(self, num_in: int) -> int:
        return -(-num_in // self.group) if self.group else 1

    def num_row_groups(self, num_out: int) -> int:
        return -(-num_out // self.rows) if self.rows else 1


ONLINE_KINDS: Mapping[str, Packing] = MappingProxyType(
    {
        "int8": Packing("int8", 0),
        "int4": Packing("int4", 32, scale="float16", offset="minimums"),
        "fp8": Packing("fp8", 128, rows=128),
    }
)
"""The forms that the setting `weights` gives to weights that are not quantized."""


def leaf_shapes(packing: Packing, num_out: int, num_in: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the shape and type of each array that holds a weight `[num_out, num_in]`; `codes` come first.

    Codes of less than a byte share one with their neighbours in the input, the first in the low bits. Those of fp8 are
    bytes: XLA for CPUs makes a wider copy of an fp8 array before it takes a part of it.

    Raises:
        ConfigError: the input cannot be divided into whole bytes and groups.
    """
    _check_divides(packing, num_in)
    scales = (packing.num_row_groups(num_out), packing.num_groups(num_in))
    held = {"e8m0": "uint8"}.get(packing.scale, packing.scale)
    codes = "int8" if packing.code == "int8" else "uint8"
    leaves: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, bits in zip(("codes", "high_bits"), PLANES[packing.code], strict=False):
        leaves[name] = ((num_out, num_in * bits // 8), codes)
    leaves["scales"] = (scales, held)
    if packing.offset == "zeros":
        leaves["zeros"] = (scales, "int8" if packing.code == "int8" else "uint8")
    if packing.offset == "minimums":
        leaves["minimums"] = (scales, held)
    if packing.super_group:
        above = ((num_out, num_in // packing.super_group), "float16")
        leaves["super_scales"] = above
        if packing.offset == "minimums":
            leaves["super_minimums"] = above
    if packing.has_order:
        leaves["group_of"] = ((num_in,), "int32")
    return leaves


def _check_divides(packing: Packing, num_in: int) -> None:
    per_byte = 8 // min(PLANES[packing.code])
    groups = [packing.super_group, per_byte, 1 if packing.code == "fp8" else packing.group]  # fp8 has partial blocks
    for size in groups:
        if size and num_in % size:
            raise ConfigError(
                f"{num_in} input features are not a multiple of {size}, as weights in {packing.code} need"
            )
