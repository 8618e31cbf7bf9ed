"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss has it for its experts: `quant_method: mxfp4`.

A weight `[experts, out, in]` has two tensors. `NAME_blocks`, u8 `[experts, out, in / 32, 16]`, has two codes in a byte,
the first in the low bits. `NAME_scales`, u8 `[experts, out, in / 32]`, has exponents of two, plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.module_patterns import is_left, names
from penstock.engine.formats.packing import Packing
from penstock.engine.formats.tensor_mapping import Leaf, TensorHeader, required

GROUP = 32
PACKING = Packing("fp4", GROUP, scale="e8m0")
NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    left: tuple[str, ...] = ()  # modules that are not quantized
    passed_over: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ConfigError for a malformed list."""
        return cls(names(fields, "modules_to_not_convert"))

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        if f"{module}_blocks" not in stored:
            return None
        required(f"{module}_scales", stored)
        return PACKING

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        return PACKING if ".experts." in module and not is_left(module, self.left) else None

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        groups = num_in // GROUP
        return {
            "codes": Leaf("_blocks", (num_out, groups, GROUP // 2), ("U8",), (1, GROUP // 2), (1, 1), _joined),
            "scales": Leaf("_scales", (num_out, groups), ("U8",), convert=exponents),
        }

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        return ()


def _joined(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(*blocks.shape[:-2], -1)


def exponents(values: np.ndarray) -> np.ndarray:
    """Returns the exponents unchanged. Raises CheckpointError if one is not a number."""
    if (values == NAN).any():
        raise CheckpointError(f"has {int((values == NAN).sum())} of {values.size} scales that are not finite")
    return values
