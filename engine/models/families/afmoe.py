"""AFMoE: Trinity (Arcee AI, 2025). Gated attention whose full layers have no positions, and sigmoid experts."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.glm4_moe import SHARED_EXPERTS
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import (
    blocks_by_type,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    without_positions,
)
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import dense_first, read_experts


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("attention_bias", None, False)  # gates would have none
    norm, dense, experts = read_norm(config), read_mlp(config), _experts(config)
    attention = replace(read_attention(config, qk_norm=norm), has_gate=True)
    local = BlockConfig(attention, dense, norm, norm_placement="around")
    blocks = blocks_by_type(config, without_positions(local), local, config.integer("global_attn_every_n_layers"))
    mlps = dense_first(config, dense, experts, config.whole("num_dense_layers"))
    blocks = [replace(block, mlp=mlp) for block, mlp in zip(blocks, mlps, strict=True)]
    model = read_model(config, family=AFMOE.model_type, dtype=dtype, blocks=blocks, norm=norm)
    return replace(model, embedding_scale=model.hidden_size**0.5) if config.flag("mup_enabled") else model


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(config, "num_experts", intermediate_size="moe_intermediate_size", normalized=True)
    return replace(
        experts,
        scores="sigmoid",
        has_correction=True,
        scale=config.number("route_scale"),
        shared=MLPConfig(experts.intermediate_size * config.integer("num_shared_experts"), experts.activation),
    )


AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    defaults={
        "vocab_size": 200_192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 32,
        "num_dense_layers": 1,
        "num_attention_heads": 16,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
    },
    configure=_configure,
    own_modules={
        **QWEN3.own_modules,
        **QWEN_EXPERTS,
        **SHARED_EXPERTS,
        ("attention", "gate"): "self_attn.gate_proj",
        ("attention_out_norm",): "post_attention_layernorm",
        ("mlp_norm",): "pre_mlp_layernorm",
        ("mlp_out_norm",): "post_mlp_layernorm",
        ("mlp", "router"): "mlp.router.gate",
    },
    own_tensors={("mlp", "correction"): "mlp.expert_bias"},
)
