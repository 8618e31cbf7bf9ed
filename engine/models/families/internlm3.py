"""InternLM 3 (Shanghai AI Laboratory, 2025): a Llama, with other names for its biases."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.errors import ConfigError
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.llama import LLAMA, llama_model
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    qkv_bias = config.flag("qkv_bias") or config.flag("attention_bias")
    bias = config.flag("bias") or config.flag("mlp_bias")
    if qkv_bias != bias:
        raise ConfigError(f"config.json: qkv_bias = {qkv_bias} beside bias = {bias} is not supported")
    return llama_model(config, INTERNLM3.model_type, dtype, attention_bias=bias, mlp_bias=bias)


INTERNLM3 = replace(
    LLAMA,
    model_type="internlm3",
    defaults={
        "vocab_size": 128_512,
        "hidden_size": 4096,
        "intermediate_size": 10_240,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
    configure=_configure,
)
