"""Qwen2 and 2.5 (Yang et al., arXiv 2407.10671): biases on queries, keys and values; some layers may slide."""

from __future__ import annotations

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.family import Family
from penstock.engine.models.hf_config import HFConfig, decoder_config, mixed_layers


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    return decoder_config(
        config, family=QWEN2.model_type, dtype=dtype, sliding_windows=mixed_layers(config), qkv_bias=True
    )


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    configure=_configure,
)
