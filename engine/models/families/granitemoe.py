"""Granite's mixtures of experts (IBM): its dense blocks, with the experts of a layer in one tensor."""

from __future__ import annotations

from penstock.engine.models.config import ExpertsConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.granite import GRANITE, granite_block, granite_model
from penstock.engine.models.hf.blocks import full_layers
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts

GATE_UP = "block_sparse_moe.input_linear.weight"


def granite_experts(config: HFConfig) -> ExpertsConfig:
    return read_experts(config, "num_local_experts", intermediate_size="intermediate_size", normalized=True)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    blocks = full_layers(config, granite_block(config, granite_experts(config)))
    return granite_model(config, GRANITEMOE.model_type, dtype, blocks)


GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    configure=_configure,
    own_tensors={
        ("mlp", "router", "kernel"): "block_sparse_moe.router.layer.weight",
        ("mlp", "experts", "gate", "kernel"): GATE_UP,
        ("mlp", "experts", "up", "kernel"): GATE_UP,
        ("mlp", "experts", "down", "kernel"): "block_sparse_moe.output_linear.weight",
    },
)
