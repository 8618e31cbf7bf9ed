"""ERNIE 4.5, dense (Baidu, 2025): Llama's blocks; neighbouring features rotate, and one field sets all biases."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import read_neighbours_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias, norm = config.flag("use_bias"), read_norm(config)
    attention = read_attention(config, rope=read_neighbours_rope, qkv_bias=has_bias, out_bias=has_bias)
    block = BlockConfig(attention, read_mlp(config, bias=has_bias), norm)
    blocks = full_layers(config, block)
    return read_model(config, family=ERNIE4_5.model_type, dtype=dtype, blocks=blocks, norm=norm)


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    configure=_configure,
)
