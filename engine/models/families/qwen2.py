"""Qwen2 and 2.5 (Yang et al., arXiv 2407.10671): biases on queries, keys and values; some layers may slide."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import mixed_layers, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    block = BlockConfig(read_attention(config, qkv_bias=True), read_mlp(config), norm)
    blocks = sliding(block, mixed_layers(config))
    return read_model(config, family=QWEN2.model_type, dtype=dtype, blocks=blocks, norm=norm)


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
