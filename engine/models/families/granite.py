"""Granite 3 and 4, dense (IBM): Llama's blocks with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block = granite_block(config, read_mlp(config, bias=config.flag("mlp_bias")))
    return granite_model(config, GRANITE.model_type, dtype, full_layers(config, block))


def granite_block(config: HFConfig, mlp: MLPConfig | ExpertsConfig) -> BlockConfig:
    has_bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias)
    attention = replace(attention, scale=config.optional_number("attention_multiplier"))
    return BlockConfig(attention, mlp, read_norm(config), residual_scale=config.number("residual_multiplier"))


def granite_model(config: HFConfig, family: str, dtype: str, blocks: list[BlockConfig]) -> ModelConfig:
    """Reads a Granite model of these blocks.

    Raises:
        ConfigError: a field is missing, or asks for a computation that is not implemented.
    """
    model = read_model(config, family=family, dtype=dtype, blocks=blocks, norm=read_norm(config))
    return replace(
        model,
        embedding_scale=config.number("embedding_multiplier"),
        logit_scale=1 / config.number("logits_scaling"),
    )


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    configure=_configure,
)
