"""Qwen3-Next (Qwen, 2025): gated delta nets in three of four layers, gated attention in the others, many experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import (
    AttentionConfig,
    BlockConfig,
    DeltaNetConfig,
    ExpertsConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.gemma import gemma_norm
from penstock.engine.models.families.qwen2_moe import QWEN2_MOE
from penstock.engine.models.hf.blocks import read_activation, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, sparse_layers
from penstock.engine.models.hf.rope import read_partial_rope

_DELTA, _FULL = "linear_attention", "full_attention"


def delta_hybrid(config: HFConfig, family: str, dtype: str, mlps: Sequence[MLPConfig | ExpertsConfig]) -> ModelConfig:
    """Reads a model of delta nets and gated attention, with a feed-forward for each of its layers."""
    config.refuse_unless("sliding_window", None)  # transformers' cache obeys it in any family
    norm, types = gemma_norm(config), _layer_types(config)
    mixers: dict[str, AttentionConfig | DeltaNetConfig] = {_DELTA: _delta_net(config), _FULL: _attention(config)}
    blocks = [BlockConfig(mixers[kind], mlp, norm) for kind, mlp in zip(types, mlps, strict=True)]
    return read_model(config, family=family, dtype=dtype, blocks=blocks, norm=norm)


def with_shared(config: HFConfig, experts: ExpertsConfig) -> ExpertsConfig:
    """Returns `experts` with the feed-forward that every token passes through, and its gate."""
    shared = MLPConfig(config.integer("shared_expert_intermediate_size"), experts.activation)
    return replace(experts, shared=shared, has_shared_gate=True)


def _attention(config: HFConfig) -> AttentionConfig:
    config.refuse_unless("attn_output_gate", None, True)  # transformers ignores it
    has_bias = config.flag("attention_bias")
    attention = read_attention(
        config, rope=read_partial_rope, qkv_bias=has_bias, out_bias=has_bias, qk_norm=gemma_norm(config)
    )
    return replace(attention, has_gate=True)


def _delta_net(config: HFConfig) -> DeltaNetConfig:
    keys, values = (config.integer(f"linear_num_{part}_heads") for part in ("key", "value"))
    if values % keys:
        raise ConfigError(
            f"config.json: linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = {keys}"
        )
    num_taps = config.integer("linear_conv_kernel_dim")
    if num_taps < 2:
        raise ConfigError(
            f"config.json: linear_conv_kernel_dim = {num_taps} is a convolution over one token, which has no state"
        )
    return DeltaNetConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        num_taps=num_taps,
        norm=replace(read_norm(config), scales_in_f32=True),
        activation=read_activation(config),
    )


def _layer_types(config: HFConfig) -> list[str]:
    """Returns the layers' types: `layer_types` says which have attention; without it, every
    `full_attention_interval`th.
    """
    num_layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
    if types is None:
        interval = config.integer("full_attention_interval", default=4)
        return [_DELTA if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_DELTA, _FULL) for kind in types):
        raise ConfigError(
            f"config.json: layer_types must list {_DELTA} or {_FULL} for {num_layers} layers, not {shown(types)}"
        )
    return types


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    dense, num_layers = read_mlp(config), config.integer("num_hidden_layers")
    mlps: list[MLPConfig | ExpertsConfig] = [dense] * num_layers
    if config.whole("num_experts"):
        experts = read_experts(
            config, "num_experts", intermediate_size="moe_intermediate_size", normalized=config.flag("norm_topk_prob")
        )
        mlps = sparse_layers(config, dense, with_shared(config, experts))
    return delta_hybrid(config, QWEN3_NEXT.model_type, dtype, mlps)


def _num_key_heads(block: BlockConfig) -> int:
    if not isinstance(block.mixer, DeltaNetConfig):
        raise TypeError(f"{block.mixer} is not a delta net")
    return block.mixer.num_key_heads


_IN_HEADS, _GATES, _CONV = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.conv1d.weight"
_QUERIES = "self_attn.q_proj"

MODULES_OF_HYBRID: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("attention", "q"): _QUERIES,
        ("attention", "gate"): _QUERIES,
        ("attention", "q_norm"): "self_attn.q_norm",
        ("attention", "k_norm"): "self_attn.k_norm",
        ("recurrence", "norm"): "linear_attn.norm",
        ("recurrence", "out"): "linear_attn.out_proj",
    }
)
"""The modules of these hybrids' layers."""

TENSORS_OF_HYBRID: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("recurrence", "q_taps"): _CONV,
        ("recurrence", "k_taps"): _CONV,
        ("recurrence", "v_taps"): _CONV,
        ("recurrence", "a_log"): "linear_attn.A_log",
        ("recurrence", "dt_bias"): "linear_attn.dt_bias",
    }
)

TURNS_OF_HYBRID: Mapping[str, Callable[[BlockConfig], int]] = MappingProxyType(
    {_QUERIES: lambda block: block.attention.num_heads}
)
"""A head's queries are stored before its gate."""

DEFAULTS_OF_HYBRID: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)

EXPERTS_OF_HYBRID: Mapping[ParamPath, str] = MappingProxyType(dict(QWEN2_MOE.own_modules))

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **DEFAULTS_OF_HYBRID,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    configure=_configure,
    own_modules={
        **MODULES_OF_HYBRID,
        **EXPERTS_OF_HYBRID,
        ("recurrence", "q"): _IN_HEADS,
        ("recurrence", "k"): _IN_HEADS,
        ("recurrence", "v"): _IN_HEADS,
        ("recurrence", "gate"): _IN_HEADS,
        ("recurrence", "beta"): _GATES,
        ("recurrence", "decay"): _GATES,
    },
    own_tensors=TENSORS_OF_HYBRID,
    turns={
        **TURNS_OF_HYBRID,
        **dict.fromkeys((_IN_HEADS, _GATES), _num_key_heads),
    },
    passed_over=("mtp.",),
)
