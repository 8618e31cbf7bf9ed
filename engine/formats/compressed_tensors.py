"""The compressed-tensors format (github.com/neuralmagic/compressed-tensors), which llm-compressor writes.

`config_groups` says how the Linears in its `targets` are quantized. The stored tensors tell which of these are:

| format | tensors of a Linear `[out, in]` |
| --- | --- |
| pack-quantized | `weight_packed`, i32 `[out, in * bits / 32]`; `weight_shape` |
| int-quantized, naive-quantized | `weight`, i8 |
| float-quantized, naive-quantized | `weight`, float8_e4m3fn |

Codes of 4 or 8 bits are packed from the low bits on, with 2**(bits - 1) added. Each Linear has a `weight_scale`:
`[out, in / group]`, or `[out, 1]` (per channel); fp8 may also have a single scale, or one per block. An asymmetric one
has a `weight_zero_point`, which is stored like the codes, but packed along `out`. `weight_g_idx` is the group of each
feature. If `input_activations` are int8 with a dynamic scale for each token, activations are quantized so before int8
and int4 weights are multiplied by them. Any other activations stay as the model computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from penstock.engine.errors import CheckpointError, ConfigError, shown
from penstock.engine.formats.bits import as_bytes, unpack_rows
from penstock.engine.formats.module_patterns import is_named, names
from penstock.engine.formats.packing import GROUPS, Packing
from penstock.engine.formats.quantization_config import CONFIG, flag, integer, unsupported
from penstock.engine.formats.tensor_mapping import (
    Leaf,
    TensorHeader,
    block_scales,
    fp8_bytes,
    order,
    required,
    scale_type,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = MappingProxyType({"int": ("channel", "group"), "float": ("tensor", "channel", "group", "block")})


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a group of Linears."""

    kind: str  # int or float
    bits: int
    strategy: str
    group: int  # input features; 0: all
    rows: int  # output features; 0: all
    has_zeros: bool
    has_order: bool
    has_int8_activations: bool = False

    @classmethod
    def read(cls, fields: object, activations: object = None) -> Self:
        if not isinstance(fields, Mapping):
            raise unsupported("config_groups.weights", fields)
        kind, strategy = fields.get("type", "int"), fields.get("strategy") or _implied_strategy(fields)
        if not isinstance(kind, str) or kind not in STRATEGIES:
            raise unsupported("config_groups.weights.type", kind)
        bits = integer(fields, "num_bits", (4, 8) if kind == "int" else (8,), 8)
        if strategy not in STRATEGIES[kind]:
            raise unsupported("config_groups.weights.strategy", strategy, f"of weights that are {kind}")
        order = fields.get("actorder")
        if order not in (None, False, "group", "weight", "static", "dynamic"):
            raise unsupported("config_groups.weights.actorder", order)
        rows, group = _block(fields, strategy)
        has_zeros = not flag(fields, "symmetric", True)
        by_token = kind == "int" and _are_int8_by_token(activations)
        return cls(kind, bits, strategy, group, rows, has_zeros, order in ("group", "dynamic"), by_token)

    def makes(self, code: str) -> bool:
        return code == ("fp8" if self.kind == "float" else f"int{self.bits}")

    def packed(self, scale: str) -> Packing:
        code = "fp8" if self.kind == "float" else f"int{self.bits}"
        offset = "zeros" if self.has_zeros else "none"
        return Packing(
            code,
            self.group,
            rows=self.rows,
            scale=scale,
            offset=offset,
            has_order=self.has_order,
            has_int8_activations=self.has_int8_activations,
        )


def _are_int8_by_token(fields: object) -> bool:
    if not isinstance(fields, Mapping):
        return False
    left_out = {"num_bits": 8, "type": "int", "symmetric": True}
    wanted = {**left_out, "strategy": "token", "dynamic": True}
    return all(fields.get(name, left_out.get(name)) == value for name, value in wanted.items())


def _implied_strategy(fields: Mapping[str, Any]) -> str:
    group = fields.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _block(fields: Mapping[str, Any], strategy: str) -> tuple[int, int]:
    if strategy == "group":
        return 1, integer(fields, "group_size", GROUPS[1:])
    if strategy == "block":
        size = fields.get("block_structure")
        if not isinstance(size, list) or len(size) != 2 or size != [128, 128]:
            raise unsupported("config_groups.weights.block_structure", size, "expected [128, 128]")
        return 128, 128
    return (0, 0) if strategy == "tensor" else (1, 0)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Reads compressed-tensors. Schemes are told apart by the type of weights, so several of one type are refused."""

    schemes: tuple[Scheme, ...]
    targets: tuple[tuple[tuple[str, ...], Scheme], ...] = ()  # the modules of each scheme
    ignored: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = (".input_scale", ".input_zero_point", ".input_global_scale")

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ConfigError for what is not implemented."""
        for name in ("sparsity_config", "transform_config"):
            if fields.get(name):
                raise unsupported(name, fields[name])
        groups = fields.get("config_groups")
        if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
            raise ConfigError(f"config.json: {CONFIG}.config_groups lists no groups: {shown(groups)}")
        for group in groups.values():
            form = group.get("format") or fields.get("format")
            if form not in FORMATS:
                raise unsupported("format", form, f"expected one of {', '.join(FORMATS)}")
        targets = tuple(
            (names(group, "targets"), Scheme.read(group.get("weights"), group.get("input_activations")))
            for group in groups.values()
        )
        schemes = tuple(dict.fromkeys(scheme for _, scheme in targets))
        if len({(scheme.kind, scheme.bits) for scheme in schemes}) != len(schemes):
            raise ConfigError(f"config.json: {CONFIG}.config_groups has different groups of one type: {shown(schemes)}")
        return cls(schemes, targets, names(fields, "ignore"))

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        name = next((name for name in (f"{module}.weight_packed", f"{module}.weight") if name in stored), None)
        kinds = {"I32": ("int", (4, 8)), "I8": ("int", (8,)), "F8_E4M3": ("float", (8,))}
        if name is None or stored[name].kind not in kinds:
            return None
        scale = f"{module}.weight_scale"
        scales = required(scale, stored)
        kind, bits = kinds[stored[name].kind]
        found = [scheme for scheme in self.schemes if scheme.kind == kind and scheme.bits in bits]
        if not found:
            raise CheckpointError(f"tensor {name} is {stored[name].kind}, which {CONFIG} has no group for")
        if len(found) > 1:
            raise CheckpointError(f"tensor {name} may be of any of the groups in {CONFIG}")
        return found[0].packed(scale_type(scale, scales))

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        if is_named(module, self.ignored):
            return None
        found = (scheme for targets, scheme in self.targets if is_named(module, targets))
        return next((scheme.packed(dtype) for scheme in found), None)

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        groups = (packing.num_row_groups(num_out), packing.num_groups(num_in))
        rows = next(scheme.rows for scheme in self.schemes if scheme.makes(packing.code))
        leaves = {"scales": block_scales(".weight_scale", rows, packing, num_out, num_in)}
        is_packed = f"{module}.weight_packed" in stored
        if is_packed:
            bits = 4 if packing.code == "int4" else 8
            shape = (num_out, -(-num_in * bits // 32))
            leaves["codes"] = Leaf(".weight_packed", shape, ("I32",), (1, 4), (1, 1), CONVERT[bits])
        elif packing.code == "fp8":
            leaves["codes"] = Leaf(".weight", (num_out, num_in), ("F8_E4M3",), convert=fp8_bytes)
        else:
            leaves["codes"] = Leaf(".weight", (num_out, num_in), ("I8",))
        if packing.offset == "zeros":
            leaves["zeros"] = (
                _packed_zeros(packing, groups) if is_packed else Leaf(".weight_zero_point", groups, ("I8",))
            )
        if packing.has_order:
            leaves["group_of"] = order(".weight_g_idx", num_in, groups[1])
        return leaves

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        check = partial(_check_shape, expected=[num_out, num_in])
        return (Leaf(".weight_shape", (2,), ("I64", "I32"), (), (), check),)


def _packed_zeros(packing: Packing, groups: tuple[int, int]) -> Leaf:
    """Returns the leaf of zeros, which are packed along the output, unlike codes along the input."""
    bits = 4 if packing.code == "int4" else 8
    per_word = 32 // bits
    shape = (-(-groups[0] // per_word), groups[1])
    return Leaf(".weight_zero_point", shape, ("I32",), (per_word, 1), (1, 1), partial(_zeros, bits=bits))


def _zeros(words: np.ndarray, *, bits: int) -> np.ndarray:
    codes = unpack_rows(words, bits)
    return codes if bits == 4 else (codes ^ np.uint8(128)).view(np.int8)


def _signed(words: np.ndarray) -> np.ndarray:
    """Converts 8-bit codes, to which 128 was added, to signed ones."""
    return (as_bytes(words) ^ np.uint8(128)).view(np.int8)


CONVERT = MappingProxyType({4: as_bytes, 8: _signed})


def _check_shape(values: np.ndarray, *, expected: list[int]) -> np.ndarray:
    if values.tolist() != expected:
        raise CheckpointError(f"says {values.tolist()}, expected {expected}")
    return values
