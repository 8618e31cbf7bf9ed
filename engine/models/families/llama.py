"""Llama 2, 3 and 3.x (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    norm = read_norm(config)
    block = BlockConfig(
        read_attention(config, qkv_bias=has_bias, out_bias=has_bias),
        read_mlp(config, bias=config.flag("mlp_bias")),
        norm,
    )
    blocks = full_layers(config, block)
    return read_model(config, family=LLAMA.model_type, dtype=dtype, blocks=blocks, norm=norm)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    configure=_configure,
)
