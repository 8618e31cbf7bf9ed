"""Code World Model (FAIR CodeGen team, arXiv 2510.02387): Llama 3's blocks, with windows in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import listed_layers, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("attention_bias", None, False)
    if config.get("rope_parameters") is None:  # null means absent
        config = replace(config, fields={**config.fields, "rope_parameters": config.defaults["rope_parameters"]})
    norm = read_norm(config)
    block = BlockConfig(read_attention(config), read_mlp(config, bias=config.flag("mlp_bias")), norm)
    window = config.integer("sliding_window") if config.get("sliding_window") else None
    blocks = sliding(block, listed_layers(config, window, lambda layer: layer % 4 != 0))
    return read_model(config, family=CWM.model_type, dtype=dtype, blocks=blocks, norm=norm)


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 6144,
        "intermediate_size": 21_504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 8192,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    configure=_configure,
)
