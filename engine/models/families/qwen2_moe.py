"""Qwen's first mixtures of experts (Yang et al., arXiv 2407.10671), with a shared expert that has a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ExpertsConfig, MLPConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.hf.blocks import (
    listed_layers,
    optional_window,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    sliding,
)
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, sparse_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(config, qkv_bias=config.flag("qkv_bias"))
    mlps = sparse_layers(config, read_mlp(config), _experts(config))
    blocks = [
        block
        for mlp, window in zip(mlps, _windows(config), strict=True)
        for block in sliding(BlockConfig(attention, mlp, norm), [window])
    ]
    return read_model(config, family=QWEN2_MOE.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _experts(config: HFConfig) -> ExpertsConfig:
    experts = read_experts(
        config, "num_experts", intermediate_size="moe_intermediate_size", normalized=config.flag("norm_topk_prob")
    )
    shared = MLPConfig(config.integer("shared_expert_intermediate_size"), experts.activation)
    return replace(experts, shared=shared, has_shared_gate=True)


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Returns each layer's window. Without `layer_types` every other layer before `max_window_layers` slides."""
    window = optional_window(config)
    first_full = 0 if window is None else config.integer("max_window_layers")
    return listed_layers(config, window, lambda layer: layer % 2 == 0 and layer < first_full)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    configure=_configure,
    own_modules={
        **QWEN_EXPERTS,
        ("mlp", "shared", "gate"): "mlp.shared_expert.gate_proj",
        ("mlp", "shared", "up"): "mlp.shared_expert.up_proj",
        ("mlp", "shared", "down"): "mlp.shared_expert.down_proj",
        ("mlp", "shared_gate"): "mlp.shared_expert_gate",
    },
)
