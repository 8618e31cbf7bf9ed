"""IQuest-Coder (IQuest Lab, 2026): a Llama."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.llama import LLAMA
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("clip_qkv", None)
    return replace(LLAMA.configure(config, dtype), family=IQUESTCODER.model_type)


IQUESTCODER = replace(
    LLAMA,
    model_type="iquestcoder",
    defaults={
        "vocab_size": 76_800,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    configure=_configure,
)
