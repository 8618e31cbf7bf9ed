"""Ministral 3 (Mistral AI, 2025): Mistral's blocks, with queries that grow with their position beside YaRN."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig, QueryScale
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import every_layer, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import flat_rope_table


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    window = config.optional_integer("sliding_window")
    norm = read_norm(config)
    attention = replace(read_attention(config), query_scale=_query_scale(config))
    blocks = sliding(BlockConfig(attention, read_mlp(config), norm), every_layer(config, window))
    return read_model(config, family=MINISTRAL3.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _query_scale(config: HFConfig) -> QueryScale:
    table = HFConfig(flat_rope_table(config), {})
    return QueryScale(table.number("llama_4_scaling_beta"), table.integer("original_max_position_embeddings"))


MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    configure=_configure,
)
