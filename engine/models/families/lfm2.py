"""LFM2 (Liquid AI, 2025): short convolutions in most layers, attention with norms of queries and keys in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import (
    BlockConfig,
    ExpertsConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    ShortConvConfig,
)
from penstock.engine.models.families.family import Family, ModelPlace
from penstock.engine.models.hf.blocks import read_attention, read_model
from penstock.engine.models.hf.config import HFConfig

_CONV, _FULL = "conv", "full_attention"


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    mlps = [MLPConfig(_intermediate_size(config))] * config.integer("num_hidden_layers")
    return lfm2_model(config, LFM2.model_type, dtype, mlps)


def lfm2_model(config: HFConfig, family: str, dtype: str, mlps: Sequence[MLPConfig | ExpertsConfig]) -> ModelConfig:
    """Reads a model of short convolutions and attention, with a feed-forward for each of its layers."""
    config.refuse_unless("sliding_window", None)  # transformers' cache obeys it in any family
    norm = NormConfig(config.number("norm_eps"))
    conv = ShortConvConfig(config.integer("hidden_size"), _num_taps(config), config.flag("conv_bias"))
    attention = read_attention(config, qk_norm=norm)
    mixers = [attention if kind == _FULL else conv for kind in _layer_types(config)]
    blocks = [BlockConfig(mixer, mlp, norm) for mixer, mlp in zip(mixers, mlps, strict=True)]
    model = read_model(config, family=family, dtype=dtype, blocks=blocks, norm=norm)
    # Early checkpoints have other names for this field, and for the size of the feed-forward.
    is_older = "tie_embedding" in config.fields
    return replace(model, tie_word_embeddings=config.flag("tie_embedding")) if is_older else model


def _num_taps(config: HFConfig) -> int:
    num_taps = config.integer("conv_L_cache")
    if num_taps < 2:
        raise ConfigError(f"config.json: conv_L_cache = {num_taps} is a convolution over one token, which has no state")
    return num_taps


def _intermediate_size(config: HFConfig) -> int:
    """Returns two thirds of the stated size, scaled and rounded up to a multiple, unless `block_auto_adjust_ff_dim` is
    off.
    """
    size = config.integer("block_ff_dim" if "block_ff_dim" in config.fields else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return size
    size, multiple = int(config.number("block_ffn_dim_multiplier") * size), config.integer("block_multiple_of")
    adjusted = HFConfig({"intermediate_size": -(-size // multiple) * multiple}, {})
    return adjusted.integer("intermediate_size")  # within the limits of a stated size


def _layer_types(config: HFConfig) -> list[str]:
    """Returns the layers' types: `layer_types` says which have attention; without it, `full_attn_idxs`; without either,
    all do.
    """
    num_layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
    if types is None:
        full = config.get("full_attn_idxs")
        full = list(range(num_layers)) if full is None else full
        if not isinstance(full, list):
            raise ConfigError(f"config.json: full_attn_idxs must be a list of layers, not {shown(full)}")
        return [_FULL if layer in full else _CONV for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_CONV, _FULL) for kind in types):
        raise ConfigError(
            f"config.json: layer_types must list {_CONV} or {_FULL} for {num_layers} layers, not {shown(types)}"
        )
    return types


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    defaults={
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    configure=_configure,
    own_modules={
        ("attention_norm",): "operator_norm",
        ("mlp_norm",): "ffn_norm",
        ("attention", "out"): "self_attn.out_proj",
        ("attention", "q_norm"): "self_attn.q_layernorm",
        ("attention", "k_norm"): "self_attn.k_layernorm",
        ("recurrence", "before"): "conv.in_proj",
        ("recurrence", "behind"): "conv.in_proj",
        ("recurrence", "input"): "conv.in_proj",
        ("recurrence", "out"): "conv.out_proj",
        ("mlp", "gate"): "feed_forward.w1",
        ("mlp", "up"): "feed_forward.w3",
        ("mlp", "down"): "feed_forward.w2",
    },
    own_tensors={("recurrence", "taps"): "conv.conv.weight", ("recurrence", "taps_bias"): "conv.conv.bias"},
    places=(ModelPlace(norm="embedding_norm"),),
)
