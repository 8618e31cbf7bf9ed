"""Seed-OSS (ByteDance, 2025): Llama's blocks, with biases on queries, keys and values."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(
        config, qkv_bias=config.flag("attention_bias"), out_bias=config.flag("attention_out_bias")
    )
    block = BlockConfig(attention, read_mlp(config, bias=config.flag("mlp_bias")), norm)
    blocks = full_layers(config, block)
    return read_model(config, family=SEED_OSS.model_type, dtype=dtype, blocks=blocks, norm=norm)


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    configure=_configure,
)
