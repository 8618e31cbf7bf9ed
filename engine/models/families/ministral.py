"""Ministral 8B (Mistral AI, 2024): Mistral's blocks; `layer_types` may give some layers full attention."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.hf.blocks import listed_layers, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    window = config.optional_integer("sliding_window")
    norm = read_norm(config)
    block = BlockConfig(read_attention(config), read_mlp(config), norm)
    blocks = sliding(block, listed_layers(config, window, lambda layer: True))
    return read_model(config, family=MINISTRAL.model_type, dtype=dtype, blocks=blocks, norm=norm)


MINISTRAL = replace(MISTRAL, model_type="ministral", architecture="MinistralForCausalLM", configure=_configure)
