"""Finds the format of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from penstock.engine.formats.awq import Awq
from penstock.engine.formats.compressed_tensors import CompressedTensors
from penstock.engine.formats.fp8 import Fp8
from penstock.engine.formats.gptq import Gptq
from penstock.engine.formats.mxfp4 import Mxfp4
from penstock.engine.formats.quantization_config import quantization_of, unsupported
from penstock.engine.formats.tensor_mapping import ConfiguredFormat


class _Read(Protocol):
    def __call__(self, fields: Mapping[str, Any]) -> ConfiguredFormat: ...


FORMATS: Mapping[str, _Read] = MappingProxyType(
    {
        "fp8": Fp8.read,
        "compressed-tensors": CompressedTensors.read,
        "awq": Awq.read,
        "gptq": Gptq.read,
        "mxfp4": Mxfp4.read,
    }
)


def read_format(fields: Mapping[str, Any]) -> ConfiguredFormat | None:
    """Reads the format that the `quantization_config` of a config.json describes; None: weights are not quantized.

    Raises:
        ConfigError: it is not supported, or is malformed.
    """
    described = quantization_of(fields)
    if described is None:
        return None
    method = described.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise unsupported("quant_method", method, f"expected one of {', '.join(FORMATS)}")
    if described.get("kv_cache_scheme") and described.get("config_groups") == {}:
        return None  # only the KV cache
    return FORMATS[method](described)


def quant_method(fields: Mapping[str, Any]) -> str | None:
    """Returns the name of what `read_format` reads, and raises the same ConfigError."""
    described = quantization_of(fields)
    return None if described is None or read_format(fields) is None else str(described["quant_method"])
