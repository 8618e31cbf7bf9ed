"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral's attention, and experts in place of each feed-forward."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import every_layer, read_attention, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    window = config.optional_integer("sliding_window")
    norm = read_norm(config)
    experts = read_experts(
        config, "num_local_experts", "num_experts", intermediate_size="intermediate_size", normalized=True
    )
    blocks = sliding(BlockConfig(read_attention(config), experts, norm), every_layer(config, window))
    return read_model(config, family=MIXTRAL.model_type, dtype=dtype, blocks=blocks, norm=norm)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    configure=_configure,
    own_modules={
        ("mlp", "router"): "block_sparse_moe.gate",
        ("mlp", "experts", "gate"): "block_sparse_moe.experts.{}.w1",
        ("mlp", "experts", "up"): "block_sparse_moe.experts.{}.w3",
        ("mlp", "experts", "down"): "block_sparse_moe.experts.{}.w2",
    },
)
