"""GPTQ (Frantar et al., arXiv 2210.17323) as AutoGPTQ and GPTQModel write it: `quant_method: gptq`.

A Linear `[out, in]` has these tensors. `qweight`, i32 `[in * bits / 32, out]`, has a column of codes in a word, from
the low bits on. `qzeros`, i32 `[in / group, out * bits / 32]`, has a row of zeros. `scales` are `[in / group, out]`,
and `g_idx` is the group of each input feature. A weight is `(code - zero) * scale`. Unless `checkpoint_format` is
gptq_v2, zeros are stored minus 1, and a zero of 0 as the largest code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.formats.bits import as_bytes, unpack_rows
from penstock.engine.formats.module_patterns import HEAD, names
from penstock.engine.formats.packing import GROUPS, Packing
from penstock.engine.formats.quantization_config import flag, integer, unsupported
from penstock.engine.formats.tensor_mapping import Leaf, TensorHeader, float_scales, order, required, scale_type


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    group: int  # input features; 0: all
    has_order: bool
    added: int  # added to a stored zero
    only: tuple[str, ...] = ()  # suffixes of a layer's quantized modules; (): all are quantized
    has_head: bool = False  # whether the head is quantized too
    passed_over: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ConfigError for what is not implemented."""
        form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise unsupported("checkpoint_format", form, "expected gptq or gptq_v2")
        for name in ("dynamic", "is_marlin_format"):  # other settings for some of the modules; another layout
            if fields.get(name):
                raise unsupported(name, fields[name])
        return cls(
            integer(fields, "bits", (4, 8), 4),
            max(0, integer(fields, "group_size", (-1, *GROUPS[1:]), 128)),
            flag(fields, "desc_act", False),
            1 if form == "gptq" else 0,
            _only(fields),
            flag(fields, "lm_head", False),
        )

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        if f"{module}.qweight" not in stored:
            return None
        scales = required(f"{module}.scales", stored)
        return self._packed(scale_type(f"{module}.scales", scales))

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        is_quantized = self.has_head if module.endswith(HEAD) else not self.only or module.endswith(self.only)
        return self._packed("float16") if is_quantized else None

    def _packed(self, scale: str) -> Packing:
        has_order = self.has_order and self.group > 0
        return Packing(f"int{self.bits}", self.group, scale=scale, offset="zeros", has_order=has_order)

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        per_word, groups = 32 // self.bits, packing.num_groups(num_in)
        if num_out % per_word or num_in % per_word:
            raise ConfigError(f"{module}: a weight of {num_out} x {num_in} is not in whole words, as GPTQ needs")
        codes, zeros = (as_bytes, _zeros) if self.bits == 4 else (_signed_bytes, _signed_zeros)
        zeros_of = partial(zeros, added=self.added)
        shape = (groups, num_out // per_word)
        leaves = {
            "codes": Leaf(
                ".qweight", (num_in // per_word, num_out), ("I32",), (1, 4), (1, 1), codes, is_transposed=True
            ),
            "zeros": Leaf(".qzeros", shape, ("I32",), (per_word, 1), (1, 1), zeros_of, is_transposed=True),
            "scales": float_scales(".scales", (groups, num_out), packing.scale, is_transposed=True),
        }
        if packing.has_order:
            leaves["group_of"] = order(".g_idx", num_in, groups)
        return leaves

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        if packing.has_order:
            return ()
        expected = np.arange(num_in, dtype=np.int32) // (packing.group or num_in)
        return (Leaf(".g_idx", (num_in,), ("I32",), (), (), partial(_check_order, expected=expected)),)


def _only(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns suffixes of a layer's quantized modules, which are listed in the groups that were quantized together."""
    groups = fields.get("modules_in_block_to_quantize") or ()
    if not isinstance(groups, list | tuple):
        raise unsupported("modules_in_block_to_quantize", groups, "expected a list of names")
    listed = [one for group in groups for one in (group if isinstance(group, list) else [group])]
    return tuple(f".{name}" for name in names({"modules_in_block_to_quantize": listed}, "modules_in_block_to_quantize"))


def _signed_bytes(words: np.ndarray) -> np.ndarray:
    return (as_bytes(words) ^ np.uint8(128)).view(np.int8)


def _zeros(words: np.ndarray, *, added: int) -> np.ndarray:
    return (unpack_rows(words, 4) + np.uint8(added)) & np.uint8(15)


def _signed_zeros(words: np.ndarray, *, added: int) -> np.ndarray:
    return ((unpack_rows(words, 8) + np.uint8(added)) ^ np.uint8(128)).view(np.int8)


def _check_order(groups: np.ndarray, *, expected: np.ndarray) -> np.ndarray:
    if not np.array_equal(groups, expected):
        raise CheckpointError("has groups in an order of their own, but quantization_config.desc_act is false")
    return groups
