"""The KV cache type that a checkpoint asks for: `kv_cache_scheme` in the `quantization_config` of
compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import ConfigError, shown
from penstock.engine.formats.quantization_config import CONFIG, quantization_of, unsupported

_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STATIC = ("tensor", "attn_head")  # strategies whose scales a checkpoint can hold
_DYNAMIC = (*_STATIC, "token")


@dataclass(frozen=True, slots=True)
class KVCacheScheme:
    """Keys and values in float8_e4m3fn."""

    is_static: bool  # scales are in the checkpoint; otherwise each token has a dynamic one


def read_kv_cache_scheme(fields: Mapping[str, Any]) -> KVCacheScheme | None:
    """Reads what the `quantization_config` of a config.json says of keys and values; None: nothing.

    Raises:
        ConfigError: it is not supported, or is malformed.
    """
    scheme = (quantization_of(fields) or {}).get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"config.json: {CONFIG}.kv_cache_scheme is not an object: {shown(scheme)}")
    found = {name: scheme.get(name) if scheme.get(name) is not None else _DEFAULTS[name] for name in _DEFAULTS}
    for name, value in _FLOAT8.items():
        if found[name] != value:
            raise unsupported(f"kv_cache_scheme.{name}", found[name], f"expected {value}")
    if not isinstance(found["dynamic"], bool):
        raise unsupported("kv_cache_scheme.dynamic", found["dynamic"], "expected true or false")
    strategies = _DYNAMIC if found["dynamic"] else _STATIC
    if found["strategy"] not in strategies:
        raise unsupported("kv_cache_scheme.strategy", found["strategy"], f"expected one of {', '.join(strategies)}")
    return KVCacheScheme(is_static=not found["dynamic"])
