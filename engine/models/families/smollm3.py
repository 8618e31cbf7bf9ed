"""SmolLM3 (Hugging Face, 2025): Llama's blocks; every fourth has no positional encoding."""

from __future__ import annotations

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import (
    listed_layers,
    optional_window,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    sliding,
    without_positions,
)
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias, norm = config.flag("attention_bias"), read_norm(config)
    attention = read_attention(config, qkv_bias=has_bias, out_bias=has_bias)
    block = BlockConfig(attention, read_mlp(config, bias=config.flag("mlp_bias")), norm)
    rotates = _layers_that_rotate(config)
    windows = listed_layers(config, optional_window(config), lambda layer: not rotates[layer])
    pairs = zip(sliding(block, windows), rotates, strict=True)
    blocks = [slid if has_rope else without_positions(slid) for slid, has_rope in pairs]
    return read_model(config, family=SMOLLM3.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _layers_that_rotate(config: HFConfig) -> list[bool]:
    """Returns which layers rotate: `no_rope_layers` has a 1 for a layer with rotary positions, and a 0 for
    one without.
    """
    num_layers = config.integer("num_hidden_layers")
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(f"config.json: no_rope_layers must list 0 or 1 for {num_layers} layers, not {shown(listed)}")
    return [bool(flag) for flag in listed[:num_layers]]


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    configure=_configure,
)
