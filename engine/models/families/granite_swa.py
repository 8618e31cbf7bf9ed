"""Granite with windows and attention sinks (IBM, 2026), dense or with experts; each layer has a rope of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.granite import GRANITE, granite_block, granite_model
from penstock.engine.models.families.granitemoeshared import GRANITEMOESHARED, granite_shared_experts
from penstock.engine.models.hf.blocks import listed_layers, read_mlp, sliding, without_positions
from penstock.engine.models.hf.config import HFConfig

_GATE_UP = "block_sparse_moe.experts.gate_up_proj"
_SINKS: Mapping[ParamPath, str] = MappingProxyType({("attention", "sinks"): "self_attn.sinks"})


def _blocks(config: HFConfig, block: BlockConfig) -> list[BlockConfig]:
    window = config.optional_integer("sliding_window")
    windows = listed_layers(config, window, lambda layer: layer % 4 != 0)
    slid = sliding(block.with_attention(sinks=True), windows)
    return [_with_theta(each, theta) for each, theta in zip(slid, _thetas(config, block), strict=True)]


def _with_theta(block: BlockConfig, theta: float) -> BlockConfig:
    """Returns the block with this base of its rope; 0 means no positions."""
    rope = block.attention.rope
    return block.with_attention(rope=replace(rope, theta=theta)) if theta and rope else without_positions(block)


def _thetas(config: HFConfig, block: BlockConfig) -> list[float]:
    num_layers, listed = config.integer("num_hidden_layers"), config.get("layer_rope_theta")
    if listed is None:
        return [block.attention.rope.theta if block.attention.rope else 0.0] * num_layers
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ConfigError(f"config.json: layer_rope_theta must list {num_layers} layers, not {shown(listed)}")
    return [HFConfig({"layer_rope_theta": theta}, {}).number("layer_rope_theta") if theta else 0.0 for theta in listed]


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block = granite_block(config, read_mlp(config, bias=config.flag("mlp_bias")))
    return granite_model(config, GRANITE_SWA.model_type, dtype, _blocks(config, block))


def _configure_moe(config: HFConfig, dtype: str) -> ModelConfig:
    block = granite_block(config, granite_shared_experts(config))
    return granite_model(config, GRANITEMOE_SWA.model_type, dtype, _blocks(config, block))


GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    defaults={
        **GRANITE.defaults,
        "vocab_size": 100_352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    configure=_configure,
    own_tensors=_SINKS,
)
GRANITEMOE_SWA = replace(
    GRANITEMOESHARED,
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    defaults={**GRANITEMOESHARED.defaults, "sliding_window": 128},
    configure=_configure_moe,
    own_tensors={
        **_SINKS,
        ("mlp", "router", "kernel"): "block_sparse_moe.router.weight",
        ("mlp", "experts", "gate", "kernel"): _GATE_UP,
        ("mlp", "experts", "up", "kernel"): _GATE_UP,
        ("mlp", "experts", "down", "kernel"): "block_sparse_moe.experts.down_proj",
    },
)
