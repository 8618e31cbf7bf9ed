"""Reading a Hugging Face `config.json`: typed access to its fields, and the geometry that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import ModelConfig, RopeConfig
from penstock.engine.models.layers import ACTIVATIONS
from penstock.engine.models.rope import ROPE_KINDS, rotary_frequencies

DTYPES = ("bfloat16", "float16", "float32")

# What a field may be at most: far above what models have, and below what takes long or a lot of memory to refuse later.
AT_MOST: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 2**24,
        "hidden_size": 2**18,
        "intermediate_size": 2**20,
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**12,
        "num_key_value_heads": 2**12,
        "head_dim": 2**12,
        "rms_norm_eps": 1,
    }
)
MAX_INTEGER = 2**31 - 1  # of any other field: positions are i32
MAX_NUMBER = 1e30  # so that an f32 holds it

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class HFConfig:
    """The fields of a `config.json`. An absent one takes the value that the family's `transformers` class gives it.

    Every reader raises ConfigError, naming the field and its value, for a field that is missing or of another type.
    """

    fields: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.fields[name] if name in self.fields else self.defaults.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number; `default` stands in for null."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive whole number, not {shown(value)}")
        return _at_most(AT_MOST.get(name, MAX_INTEGER), name, value)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; `default` stands in for null."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"config.json: {name} must be a number above 0, not {shown(value)}")
        return float(_at_most(AT_MOST.get(name, MAX_NUMBER), name, value))

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


def decoder_config(
    config: HFConfig,
    *,
    family: str,
    dtype: str,
    sliding_windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """What all families read alike. The keyword arguments are where they differ.

    Raises:
        ConfigError: a field is missing, contradicts another, or asks for a computation that is not implemented.
    """
    for name in ("quantization_config", "compression_config", "per_layer_config"):
        config.refuse_unless(name, None, {})
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
        )
    head_dim = _head_dim(config, hidden_size, num_heads)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=_finite(_rope(config), head_dim),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows,
        hidden_act=_activation(config),
        dtype=checked_dtype(dtype),
    )


def every_layer(config: HFConfig, window: int | None) -> tuple[int | None, ...]:
    """The same window for all layers; a `layer_types` that says otherwise is refused."""
    num_layers = config.integer("num_hidden_layers")
    kind = "full_attention" if window is None else "sliding_attention"
    config.refuse_unless("layer_types", None, [kind] * num_layers)
    return (window,) * num_layers


def mixed_layers(config: HFConfig) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types` says which layers slide; without it, those from `max_window_layers` on do."""
    num_layers = config.integer("num_hidden_layers")
    slides = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    window = config.integer("sliding_window") if slides else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers")
        if window is not None and (not isinstance(first, int) or isinstance(first, bool)):
            raise ConfigError(f"config.json: max_window_layers must be a whole number, not {shown(first)}")
        return tuple(window if window is not None and layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ConfigError(f"config.json: layer_types must list {num_layers} layers, not {shown(layer_types)}")
    return tuple(_window_of(kind, window) for kind in layer_types)


def checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {shown(dtype)} is not one of {', '.join(DTYPES)}")
    return dtype


def _at_most(limit: float, name: str, value: _T) -> _T:
    if value > limit:
        raise ConfigError(f"config.json: {name} must be at most {limit}, not {shown(value)}")
    return value


def _window_of(kind: object, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(f"config.json: attention type {shown(kind)} in layer_types is not supported")
    if window is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, but use_sliding_window or sliding_window is off"
        )
    return window


def _head_dim(config: HFConfig, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim = {head_dim} is odd; rotary positions need an even one")
    return head_dim


def _activation(config: HFConfig) -> str:
    activation = config.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act = {shown(activation)} is not one of {', '.join(ACTIVATIONS)}")
    return str(activation)


def _rope(config: HFConfig) -> RopeConfig:
    """Both dialects: `rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5 that holds all."""
    config.refuse_unless("partial_rotary_factor", None, 1)
    config.number("rope_theta", default=10_000.0)  # must make sense even where the table's own wins
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError(f"config.json: rotary parameters must be one flat table for all layers, not {shown(scaling)}")
    rope = HFConfig(scaling, defaults={"rope_theta": config.get("rope_theta")})
    rope.refuse_unless("partial_rotary_factor", None, 1)
    theta = rope.number("rope_theta", default=10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {shown(kind)} is not one of {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    max_position = config.integer("max_position_embeddings")
    # A value beside the table wins over one inside it, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = HFConfig({"original_max_position_embeddings": original}, {}).integer(
        "original_max_position_embeddings", default=max_position
    )
    return _llama3(rope, theta, original) if kind == "llama3" else _yarn(rope, theta, original, max_position)


def _finite(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Numbers that each make sense can still be without any together."""
    try:
        with np.errstate(all="ignore"):
            frequencies, scale = rotary_frequencies(rope, head_dim)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"config.json: no rotary frequencies can be computed from {rope}: {error}") from error
    if not np.isfinite(frequencies).all() or not np.isfinite(np.float32(scale)):
        raise ConfigError(f"config.json: the rotary frequencies are not finite with {rope}")
    return rope


def _llama3(rope: HFConfig, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ConfigError(f"config.json: high_freq_factor = {high} must be above low_freq_factor = {low}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: HFConfig, theta: float, original: int, max_position: int) -> RopeConfig:
    def optional(name: str) -> float | None:
        return rope.number(name) if rope.get(name) else None

    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=rope.number("factor", default=max_position / original),
        original_max_position=original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=rope.number("attention_factor") if rope.get("attention_factor") is not None else None,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate") if rope.get("truncate") is not None else True,
    )
