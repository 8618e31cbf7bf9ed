"""GLM-4 and GLM-Z1 of 2025 (Z.ai): GLM's blocks, with norms after attention and feed-forward too."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.glm import GATE_AND_UP, GLM, glm_model
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    return glm_model(config, GLM4.model_type, dtype, "around")


GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    configure=_configure,
    own_modules={
        **GATE_AND_UP,
        ("attention_out_norm",): "post_self_attn_layernorm",
        ("mlp_out_norm",): "post_mlp_layernorm",
    },
)
