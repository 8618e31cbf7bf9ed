"""Qwen3's mixtures of experts (Yang et al., arXiv 2505.09388), for example Qwen3-30B-A3B."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.hf.blocks import (
    every_layer,
    optional_window,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    sliding,
)
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, sparse_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    window = optional_window(config)
    norm = read_norm(config)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm)
    experts = read_experts(
        config,
        "num_experts",
        "num_local_experts",
        intermediate_size="moe_intermediate_size",
        normalized=config.flag("norm_topk_prob"),
    )
    mlps = sparse_layers(config, read_mlp(config), experts)
    blocks = [
        sliding(BlockConfig(attention, mlp, norm), [window])[0]
        for mlp, window in zip(mlps, every_layer(config, window), strict=True)
    ]
    return read_model(config, family=QWEN3_MOE.model_type, dtype=dtype, blocks=blocks, norm=norm)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    configure=_configure,
    own_modules={**QWEN3.own_modules, **QWEN_EXPERTS},
)
