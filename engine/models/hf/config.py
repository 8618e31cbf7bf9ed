"""Typed access to the fields of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.engine.errors import ConfigError, shown

DTYPES = ("bfloat16", "float16", "float32")

# Upper bounds of fields: far above what models have, but low enough that a later refusal is quick and cheap in memory.
AT_MOST: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 2**24,
        "hidden_size": 2**18,
        "intermediate_size": 2**20,
        "moe_intermediate_size": 2**20,
        "block_ff_dim": 2**20,
        "block_multiple_of": 2**20,
        "conv_L_cache": 2**10,
        "linear_conv_kernel_dim": 2**10,
        "linear_num_key_heads": 2**12,
        "linear_num_value_heads": 2**12,
        "linear_key_head_dim": 2**12,
        "linear_value_head_dim": 2**12,
        "shared_expert_intermediate_size": 2**20,
        "num_experts": 2**12,
        "num_local_experts": 2**12,
        "n_routed_experts": 2**12,
        "n_shared_experts": 2**6,
        "num_nextn_predict_layers": 2**6,
        "num_mtp_layers": 2**6,
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**12,
        "num_key_value_heads": 2**12,
        "head_dim": 2**12,
        "global_head_dim": 2**12,
        "num_global_key_value_heads": 2**12,
        "hidden_size_per_layer_input": 2**16,
        "top_k_experts": 2**12,
        "rms_norm_eps": 1,
        "layer_norm_eps": 1,
        "norm_eps": 1,
    }
)
MAX_INTEGER = 2**31 - 1  # of any other field: positions are i32
MAX_NUMBER = 1e30  # so that it fits into an f32

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class HFConfig:
    """The fields of a `config.json`. An absent field has the default of the family's configuration class in
    `transformers`.

    Every reader raises ConfigError, naming the field and its value, for a field that is missing or of another type.
    """

    fields: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.fields[name] if name in self.fields else self.defaults.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Reads a positive whole number; `default` stands in for null."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive whole number, not {shown(value)}")
        return _bounded(AT_MOST.get(name, MAX_INTEGER), name, value)

    def optional_integer(self, name: str) -> int | None:
        """Reads a positive whole number, or None for null."""
        return None if self.get(name) is None else self.integer(name)

    def whole(self, name: str) -> int:
        """Reads a whole number; null is 0."""
        return 0 if self.get(name) in (None, 0) else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a number above 0; `default` stands in for null."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"config.json: {name} must be a number above 0, not {shown(value)}")
        return float(_bounded(AT_MOST.get(name, MAX_NUMBER), name, value))

    def optional_number(self, name: str) -> float | None:
        """Reads a number above 0, or None for null."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, not {shown(value)}")
        return bool(value)

    def refuse_unless(self, name: str, *accepted: object) -> None:
        """Refuses a field that changes the computation in a way that is not implemented."""
        value = self.get(name)
        if value not in accepted:
            raise ConfigError(f"config.json: {name} = {shown(value)} is not supported")


def text_fields(config: HFConfig) -> Mapping[str, Any]:
    """Returns the fields of the text part of a model that also takes images, with the fields around it that concern
    text.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config must be a table, not {shown(text)}")
    around = {name: config.get(name) for name in ("tie_word_embeddings", "quantization_config")}
    return {**text, **{name: value for name, value in around.items() if value is not None}}


def checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {shown(dtype)} is not one of {', '.join(DTYPES)}")
    return dtype


def _bounded(limit: float, name: str, value: _T) -> _T:
    if value > limit:
        raise ConfigError(f"config.json: {name} must be at most {limit}, not {shown(value)}")
    return value
