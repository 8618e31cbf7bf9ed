"""Gemma (arXiv 2403.08295): norms and embeddings of its own scale, and a feed-forward gated by GELU.

The norms' weights are stored minus 1. Embeddings are multiplied by the square root of their size, rounded to the
model's type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from penstock.engine.models.config import AttentionConfig, BlockConfig, ModelConfig, NormConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig

DEFAULTS = MappingProxyType(
    {
        "vocab_size": 256_000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
)


def gemma_norm(config: HFConfig) -> NormConfig:
    return replace(read_norm(config), unit_offset=True, scales_in_f32=True)


def gemma_attention(config: HFConfig, **options: Any) -> AttentionConfig:
    """Reads Gemma's attention; `options` are those of `read_attention`."""
    has_bias = config.flag("attention_bias")
    return read_attention(config, qkv_bias=has_bias, out_bias=has_bias, **options)


def gemma_model(config: HFConfig, family: str, dtype: str, blocks: Iterable[BlockConfig]) -> ModelConfig:
    config.refuse_unless("use_bidirectional_attention", None, False)
    model = read_model(config, family=family, dtype=dtype, blocks=blocks, norm=gemma_norm(config))
    return replace(model, embedding_scale=float(jnp.dtype(dtype).type(model.hidden_size**0.5)))


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block = BlockConfig(gemma_attention(config), read_mlp(config), gemma_norm(config))
    if config.get("hidden_act") == "gelu":  # the first releases say so, but mean its approximation
        block = replace(block, mlp=replace(block.mlp, activation="gelu_pytorch_tanh"))
    return gemma_model(config, GEMMA.model_type, dtype, full_layers(config, block))


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults={
        **DEFAULTS,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    configure=_configure,
)
