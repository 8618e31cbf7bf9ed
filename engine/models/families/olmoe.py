"""OLMoE (arXiv 2409.02060): experts, and norms over the queries and keys of all heads together."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts


def olmoe_experts(config: HFConfig) -> ExpertsConfig:
    return read_experts(
        config,
        "num_experts",
        "num_local_experts",
        intermediate_size="intermediate_size",
        normalized=config.flag("norm_topk_prob"),
    )


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("clip_qkv", None)
    has_bias, norm = config.flag("attention_bias"), read_norm(config)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias)
    block = BlockConfig(replace(attention, qk_projection_norm=norm), olmoe_experts(config), norm)
    blocks = full_layers(config, block)
    return read_model(config, family=OLMOE.model_type, dtype=dtype, blocks=blocks, norm=norm)


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "intermediate_size": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    configure=_configure,
    own_modules={
        **QWEN_EXPERTS,
        ("attention", "q_projection_norm"): "self_attn.q_norm",
        ("attention", "k_projection_norm"): "self_attn.k_norm",
    },
)
