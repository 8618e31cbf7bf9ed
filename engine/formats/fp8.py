"""FP8 with a scale for each block of a weight, as DeepSeek-V3 and Qwen3 are published: `quant_method: fp8`.

A Linear has `weight`, float8_e4m3fn `[out, in]`, and `weight_scale_inv`, the factor of each block (arXiv 2412.19437,
section 3.3.2). The last block of an axis may be partial. Activations are not quantized here, whatever
`activation_scheme` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.engine.formats.module_patterns import HEAD, is_left, names
from penstock.engine.formats.packing import Packing
from penstock.engine.formats.quantization_config import integer, unsupported
from penstock.engine.formats.tensor_mapping import Leaf, TensorHeader, block_scales, fp8_bytes, required, scale_type

KIND = "F8_E4M3"
BLOCKS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Fp8:
    rows: int  # in a block; 0: one scale for the whole weight
    columns: int
    left: tuple[str, ...] = ()  # modules that are not quantized
    passed_over: tuple[str, ...] = (".input_scale", ".activation_scale")

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ConfigError for what is not implemented."""
        if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise unsupported("fmt", fields["fmt"], "expected e4m3")
        left = (*names(fields, "modules_to_not_convert"), HEAD)
        size = fields.get("weight_block_size", (128, 128))
        if size is None:
            return cls(0, 0, left)
        if not isinstance(size, list | tuple) or len(size) != 2:
            raise unsupported("weight_block_size", size, "expected two sizes")
        rows, columns = (integer({"weight_block_size": n}, "weight_block_size", BLOCKS) for n in size)
        return cls(rows, columns, left)

    def packing(self, module: str, stored: Mapping[str, TensorHeader]) -> Packing | None:
        weight, scale = f"{module}.weight", f"{module}.weight_scale_inv"
        if weight not in stored or stored[weight].kind != KIND:
            return None
        kind = scale_type(scale, required(scale, stored))
        return Packing("fp8", self.columns, rows=self.rows, scale=kind)

    def expected(self, module: str, num_in: int, dtype: str) -> Packing | None:
        return None if is_left(module, self.left) else Packing("fp8", self.columns, rows=self.rows)

    def leaves(
        self, module: str, stored: Mapping[str, TensorHeader], packing: Packing, num_out: int, num_in: int
    ) -> Mapping[str, Leaf]:
        return {
            "codes": Leaf(".weight", (num_out, num_in), (KIND,), convert=fp8_bytes),
            "scales": block_scales(".weight_scale_inv", self.rows, packing, num_out, num_in),
        }

    def checks(self, packing: Packing, num_out: int, num_in: int) -> tuple[Leaf, ...]:
        return ()
