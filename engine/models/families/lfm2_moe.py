"""LFM2 with experts (Liquid AI, 2025): a sigmoid router, whose choice may have a correction; dense layers first."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.lfm2 import LFM2, lfm2_model
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import dense_first, read_experts


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    dense, experts = MLPConfig(config.integer("intermediate_size")), _experts(config)
    mlps = dense_first(config, dense, experts, config.whole("num_dense_layers"))
    return lfm2_model(config, LFM2_MOE.model_type, dtype, mlps)


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(
        config, "num_experts", intermediate_size="moe_intermediate_size", normalized=config.flag("norm_topk_prob")
    )
    return replace(
        experts,
        scores="sigmoid",
        has_correction=config.flag("use_expert_bias"),
        scale=config.number("routed_scaling_factor"),
        added_to_sum=1e-6,
    )


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    defaults={
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    configure=_configure,
    own_modules={
        **LFM2.own_modules,
        ("mlp", "router"): "feed_forward.gate",
        ("mlp", "experts", "gate"): "feed_forward.experts.{}.w1",
        ("mlp", "experts", "up"): "feed_forward.experts.{}.w3",
        ("mlp", "experts", "down"): "feed_forward.experts.{}.w2",
    },
    own_tensors={**LFM2.own_tensors, ("mlp", "correction"): "feed_forward.expert_bias"},
)
