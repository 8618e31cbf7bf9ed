"""Granite's mixtures of experts with a shared one (IBM)."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.granite import granite_block, granite_model
from penstock.engine.models.families.granitemoe import GRANITEMOE, granite_experts
from penstock.engine.models.hf.blocks import full_layers
from penstock.engine.models.hf.config import HFConfig


def granite_shared_experts(config: HFConfig) -> ExpertsConfig:
    experts, size = granite_experts(config), config.whole("shared_intermediate_size")
    return replace(experts, shared=MLPConfig(size, experts.activation) if size else None)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    blocks = full_layers(config, granite_block(config, granite_shared_experts(config)))
    return granite_model(config, GRANITEMOESHARED.model_type, dtype, blocks)


GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    configure=_configure,
    own_modules={
        ("mlp", "shared", "gate"): "shared_mlp.input_linear",
        ("mlp", "shared", "up"): "shared_mlp.input_linear",
        ("mlp", "shared", "down"): "shared_mlp.output_linear",
    },
)
