"""Helium (Kyutai, 2025): Llama's blocks; neighbouring features rotate, and norms scale in f32."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import read_neighbours_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = replace(read_norm(config), scales_in_f32=True)
    attention = read_attention(config, rope=read_neighbours_rope, qkv_bias=config.flag("attention_bias"))
    blocks = full_layers(config, BlockConfig(attention, read_mlp(config, bias=config.flag("mlp_bias")), norm))
    return read_model(config, family=HELIUM.model_type, dtype=dtype, blocks=blocks, norm=norm)


HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    defaults={
        "vocab_size": 48_000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-8,
        "max_position_embeddings": 4096,
        "rope_theta": 100_000.0,
    },
    configure=_configure,
)
