"""Quantized tensors of GGUF files: each declares the type of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.formats.gguf_blocks import BLOCK_TYPES
from penstock.engine.formats.packing import Packing
from penstock.engine.formats.tensor_mapping import Leaf, TensorHeader


@dataclass(frozen=True, slots=True)
class Gguf:
    """The format of GGUF files. For a quantized tensor, the header's shape is that of its bytes, and its kind is the
    block type.
    """

    passed_over: tuple[str, ...] = ()

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        header = stored.get(f"{module}.weight")
        return None if header is None or header.kind not in BLOCK_TYPES else BLOCK_TYPES[header.kind].packing

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        kind = stored[f"{module}.weight"].kind
        return BLOCK_TYPES[kind].leaves(kind, num_out, num_in)

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        return ()
