"""FlexOlmo (Shi et al., arXiv 2507.07024): OLMo 2's blocks, with OLMoE's experts."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.olmo2 import OLMO2_MODULES, olmo2_block, olmo2_norm
from penstock.engine.models.families.olmoe import OLMOE, olmoe_experts
from penstock.engine.models.hf.blocks import full_layers, read_model
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block = replace(olmo2_block(config), mlp=olmoe_experts(config))
    blocks = full_layers(config, block)
    return read_model(config, family=FLEX_OLMO.model_type, dtype=dtype, blocks=blocks, norm=olmo2_norm(config))


FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 5,
        "num_experts": 7,
    },
    configure=_configure,
    own_modules={**OLMOE.own_modules, **OLMO2_MODULES},
)
