"""Llama 2, 3 and 3.x (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig


def llama_model(config: HFConfig, family: str, dtype: str, *, attention_bias: bool, mlp_bias: bool) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(config, qkv_bias=attention_bias, out_bias=attention_bias)
    blocks = full_layers(config, BlockConfig(attention, read_mlp(config, bias=mlp_bias), norm))
    return read_model(config, family=family, dtype=dtype, blocks=blocks, norm=norm)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    attention_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return llama_model(config, LLAMA.model_type, dtype, attention_bias=attention_bias, mlp_bias=mlp_bias)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    configure=_configure,
)
