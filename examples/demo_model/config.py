"""Geometry of the demo model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from examples.demo_model.tokenizer import END, PAD, VOCAB_SIZE
from penstock.engine.models import FAMILIES

QWEN3 = FAMILIES["qwen3"]

CONFIG_JSON: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": [QWEN3.architecture],
        "model_type": QWEN3.model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
)

DEMO_CONFIG = QWEN3.config(CONFIG_JSON, "float32")
