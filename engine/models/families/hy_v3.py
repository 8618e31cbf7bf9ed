"""Hunyuan 3 (Tencent, 2026): norms of each head's queries and keys, and experts with a sigmoid router."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, typed_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias, norm = config.flag("attention_bias"), read_norm(config)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm)
    dense = read_mlp(config, bias=config.flag("mlp_bias"))
    mlps = typed_layers(config, dense, _experts(config), num_dense=1)
    block = BlockConfig(attention, dense, norm)
    blocks = [replace(each, mlp=mlp) for each, mlp in zip(full_layers(config, block), mlps, strict=True)]
    model = read_model(config, family=HY_V3.model_type, dtype=dtype, blocks=blocks, norm=norm)
    return replace(model, num_draft_layers=config.whole("num_nextn_predict_layers"))


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(
        config, "num_experts", "num_local_experts", intermediate_size="moe_intermediate_size", normalized=True
    )
    size = experts.intermediate_size * config.integer("num_shared_experts")
    return replace(
        experts,
        scores="sigmoid",
        has_correction=True,
        scale=config.number("router_scaling_factor"),
        shared=MLPConfig(size, experts.activation, bias=config.flag("mlp_bias")),
    )


HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    defaults={
        "vocab_size": 120_832,
        "hidden_size": 4096,
        "intermediate_size": 13_312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 11_158_840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
    configure=_configure,
    own_modules={
        **QWEN3.own_modules,
        **QWEN_EXPERTS,
        ("mlp", "router"): "mlp.router.gate",
        ("mlp", "shared", "gate"): "mlp.shared_mlp.gate_proj",
        ("mlp", "shared", "up"): "mlp.shared_mlp.up_proj",
        ("mlp", "shared", "down"): "mlp.shared_mlp.down_proj",
    },
    own_tensors={("mlp", "correction"): "mlp.expert_bias"},
)
