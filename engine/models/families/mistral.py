"""Mistral (Jiang et al., arXiv 2310.06825): Llama's blocks, with one sliding window for all layers or none."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import every_layer, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    window = config.optional_integer("sliding_window")
    norm = read_norm(config)
    block = BlockConfig(read_attention(config), read_mlp(config), norm)
    blocks = sliding(block, every_layer(config, window))
    return read_model(config, family=MISTRAL.model_type, dtype=dtype, blocks=blocks, norm=norm)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    configure=_configure,
)
