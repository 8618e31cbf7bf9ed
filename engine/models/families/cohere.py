"""Cohere: Command R and Aya (Cohere, 2024): Cohere 2's blocks without windows; positions rotate in all layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig, NormConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import read_neighbours_rope


def cohere_block(config: HFConfig) -> BlockConfig:
    """Reads attention and feed-forward that read one LayerNorm, in parallel."""
    config.refuse_unless("use_qk_norm", None, False)  # LayerNorms with weights of each head
    has_bias = config.flag("attention_bias")
    attention = read_attention(config, rope=read_neighbours_rope, qkv_bias=has_bias, out_bias=has_bias)
    norm = NormConfig(config.number("layer_norm_eps"), kind="layer")
    return BlockConfig(attention, read_mlp(config), norm, parallel=True)


def cohere_model(config: HFConfig, family: str, dtype: str, blocks: list[BlockConfig]) -> ModelConfig:
    model = read_model(config, family=family, dtype=dtype, blocks=blocks, norm=blocks[0].norm)
    return replace(model, logit_scale=config.number("logit_scale"))


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    return cohere_model(config, COHERE.model_type, dtype, full_layers(config, cohere_block(config)))


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    configure=_configure,
)
