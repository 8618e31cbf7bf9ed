"""Qwen3 (Yang et al., arXiv 2505.09388): per-head norms on queries and keys, a head size of its own."""

from __future__ import annotations

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.family import Family
from penstock.engine.models.hf_config import HFConfig, decoder_config, mixed_layers
from penstock.engine.models.qwen2 import QWEN2


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    attention_bias = config.flag("attention_bias")
    return decoder_config(
        config,
        family=QWEN3.model_type,
        dtype=dtype,
        sliding_windows=mixed_layers(config),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
    )


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
