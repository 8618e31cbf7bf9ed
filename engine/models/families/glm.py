"""GLM-4 9B of 2024 (GLM Team, arXiv 2406.12793): half of each head rotates, in neighbours; gate and up are fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig, NormPlacement, RopeConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import read_partial_rope

GATE_AND_UP: Mapping[ParamPath, str] = MappingProxyType(
    {("mlp", "gate"): "mlp.gate_up_proj", ("mlp", "up"): "mlp.gate_up_proj"}
)


def glm_model(config: HFConfig, family: str, dtype: str, norm_placement: NormPlacement) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(config, rope=_rope, qkv_bias=config.flag("attention_bias"))
    block = BlockConfig(attention, read_mlp(config), norm, norm_placement)
    blocks = full_layers(config, block)
    return read_model(config, family=family, dtype=dtype, blocks=blocks, norm=norm)


def _rope(config: HFConfig, head_dim: int) -> RopeConfig:
    return replace(read_partial_rope(config, head_dim), interleaved=True)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    return glm_model(config, GLM.model_type, dtype, "before")


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    configure=_configure,
    own_modules=GATE_AND_UP,
)
