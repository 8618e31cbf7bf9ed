"""Llama 2, 3 and 3.x (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from __future__ import annotations

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.family import Family
from penstock.engine.models.hf_config import HFConfig, decoder_config, every_layer


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("sliding_window", None)
    attention_bias = config.flag("attention_bias")
    return decoder_config(
        config,
        family=LLAMA.model_type,
        dtype=dtype,
        sliding_windows=every_layer(config, None),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    configure=_configure,
)
