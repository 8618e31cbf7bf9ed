"""Qwen3 (Yang et al., arXiv 2505.09388): per-head norms on queries and keys, a head size of its own."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.hf.blocks import mixed_layers, read_attention, read_mlp, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    norm = read_norm(config)
    block = BlockConfig(
        read_attention(config, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm), read_mlp(config), norm
    )
    blocks = sliding(block, mixed_layers(config))
    return read_model(config, family=QWEN3.model_type, dtype=dtype, blocks=blocks, norm=norm)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": 128},
    configure=_configure,
    own_modules={
        ("attention", "q_norm"): "self_attn.q_norm",
        ("attention", "k_norm"): "self_attn.k_norm",
    },
)
