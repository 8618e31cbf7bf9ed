"""Paged attention behind one contract, with an implementation per platform."""

from __future__ import annotations

from pathlib import Path

from engine.attention.contract import AttentionBackend, KVCacheSpec, RaggedBatch
from engine.attention.native import NativeAttention, NativeUnavailableError
from engine.attention.xla import XlaAttention
from engine.errors import ConfigError

__all__ = ["ATTENTION_CHOICES", "AttentionBackend", "KVCacheSpec", "RaggedBatch", "XlaAttention", "attention_for"]

ATTENTION_CHOICES = ("auto", "native", "xla")
_NATIVE_DTYPES = ("float32", "bfloat16")


def attention_for(choice: str, platform: str, dtype: str, build_dir: Path) -> AttentionBackend:
    """The implementation for a device platform (`cpu`, `gpu`, `tpu`) and a model's type.

    `auto` takes the native form on CPU where a C++ compiler is at hand, and the XLA form otherwise.

    Raises:
        ConfigError: `choice` cannot be had here; the message says why.
    """
    if choice not in ATTENTION_CHOICES:
        raise ConfigError(f"attention must be one of {', '.join(ATTENTION_CHOICES)}, not {choice!r}")
    if choice == "xla" or (choice == "auto" and (platform != "cpu" or dtype not in _NATIVE_DTYPES)):
        return XlaAttention()
    if platform != "cpu" or dtype not in _NATIVE_DTYPES:
        raise ConfigError(f"attention 'native' is for {' and '.join(_NATIVE_DTYPES)} on CPU, not {dtype} on {platform}")
    try:
        return NativeAttention(build_dir)
    except NativeUnavailableError as error:
        if choice == "native":
            raise ConfigError(f"attention 'native' cannot be built: {error}") from error
        return XlaAttention()
