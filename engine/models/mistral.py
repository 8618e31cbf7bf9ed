"""Mistral (Jiang et al., arXiv 2310.06825): Llama's blocks, with one sliding window for all layers or none."""

from __future__ import annotations

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.family import Family
from penstock.engine.models.hf_config import HFConfig, decoder_config, every_layer


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    return decoder_config(config, family=MISTRAL.model_type, dtype=dtype, sliding_windows=every_layer(config, window))


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    configure=_configure,
)
