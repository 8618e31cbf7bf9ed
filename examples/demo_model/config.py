"""Geometry of the demo model."""

from __future__ import annotations

from examples.demo_model.tokenizer import VOCAB_SIZE
from penstock.engine.models.config import ModelConfig, RopeConfig

DEMO_CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=384,
    num_layers=5,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position=1024,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=True,
    sliding_windows=(None,) * 5,
    dtype="float32",
)
