"""AWQ (Lin et al., arXiv 2306.00978) as AutoAWQ writes it: `quant_method: awq`, version gemm.

A Linear `[out, in]` has these tensors. `qweight`, i32 `[in, out / 8]`, has eight columns in a word, from the low bits
on columns 0, 2, 4, 6, 1, 3, 5, 7. `qzeros`, i32 `[in / group, out / 8]`, has the same order. `scales` are `[in / group,
out]`. A weight is `(code - zero) * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.engine.errors import ConfigError
from penstock.engine.formats.bits import pack, unpack_rows
from penstock.engine.formats.module_patterns import HEAD, is_left, names
from penstock.engine.formats.packing import GROUPS, Packing
from penstock.engine.formats.quantization_config import flag, integer, unsupported
from penstock.engine.formats.tensor_mapping import Leaf, TensorHeader, float_scales, required, scale_type

PER_WORD = 8
ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each column in its word


@dataclass(frozen=True, slots=True)
class Awq:
    group: int  # input features; 0: all
    left: tuple[str, ...] = ()  # modules that are not quantized
    passed_over: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ConfigError for what is not implemented."""
        integer(fields, "bits", (4,), 4)
        version = fields.get("version") or fields.get("format") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise unsupported("version", version, "expected gemm")
        if not flag(fields, "zero_point", True):
            raise unsupported("zero_point", False)
        left = (*names(fields, "modules_to_not_convert"), HEAD)
        return cls(max(0, integer(fields, "group_size", (-1, *GROUPS[1:]), 128)), left)

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        if f"{module}.qweight" not in stored:
            return None
        scales = required(f"{module}.scales", stored)
        return Packing("int4", self.group, scale=scale_type(f"{module}.scales", scales), offset="zeros")

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        is_whole = is_left(module, self.left)
        return None if is_whole else Packing("int4", self.group, scale="float16", offset="zeros")

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        if num_out % PER_WORD:
            raise ConfigError(f"{module}: {num_out} output features are not a multiple of {PER_WORD}, as AWQ needs")
        words, groups = num_out // PER_WORD, packing.num_groups(num_in)
        return {
            "codes": Leaf(".qweight", (num_in, words), ("I32",), (PER_WORD, 1), (1, 2), _codes, is_transposed=True),
            "zeros": Leaf(".qzeros", (groups, words), ("I32",), (PER_WORD, 1), (1, 1), _reordered, is_transposed=True),
            "scales": float_scales(".scales", (groups, num_out), packing.scale, is_transposed=True),
        }

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        return ()


def _codes(words: np.ndarray) -> np.ndarray:
    return pack(_reordered(words), 4)


def _reordered(words: np.ndarray) -> np.ndarray:
    """Converts i32 `[out / 8, n]` to u8 `[out, n]`."""
    codes = unpack_rows(words, 4).reshape(-1, PER_WORD, words.shape[1])
    return codes[:, ORDER].reshape(-1, words.shape[1])
