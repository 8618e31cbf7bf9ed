"""Flint (2026): Qwen3's mixtures of experts with a shared one, a sigmoid router and attention sinks.

Layers with a window rotate; those with full attention have no positional encoding.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.qwen2_moe import QWEN2_MOE
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import (
    listed_layers,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    sliding,
    without_positions,
)
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, sparse_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias, norm = config.flag("attention_bias"), replace(read_norm(config), scales_in_f32=True)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm)
    block = BlockConfig(replace(attention, sinks=True), read_mlp(config), norm)
    mlps = sparse_layers(config, read_mlp(config), _experts(config), otherwise=[0, 1])
    blocks = [
        replace(slid if slid.attention.sliding_window else without_positions(slid), mlp=mlp)
        for slid, mlp in zip(sliding(block, _windows(config)), mlps, strict=True)
    ]
    return read_model(config, family=FLINT.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(
        config, "num_experts", intermediate_size="moe_intermediate_size", normalized=config.flag("norm_topk_prob")
    )
    shared = MLPConfig(config.integer("shared_expert_intermediate_size"), experts.activation)
    return replace(experts, scores="sigmoid", shared=shared)


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Returns each layer's window. Without `layer_types` the first two, the last and every fourth layer have none."""
    last = config.integer("num_hidden_layers") - 1
    window = config.optional_integer("sliding_window")
    return listed_layers(config, window, lambda layer: layer >= 2 and layer % 4 != 1 and layer != last)


FLINT = Family(
    model_type="flint",
    architecture="FlintForCausalLM",
    defaults={
        "vocab_size": 150_144,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "sliding_window": 513,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "num_experts": 256,
        "norm_topk_prob": True,
    },
    configure=_configure,
    own_modules={
        **QWEN3.own_modules,
        **{path: name for path, name in QWEN2_MOE.own_modules.items() if path != ("mlp", "shared_gate")},
    },
    own_tensors={("attention", "sinks"): "self_attn.softmax_offset"},
)
