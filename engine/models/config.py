"""What a decoder of any supported family is made of, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and, for long contexts, how its frequencies are scaled.

    `kind` is one of `default`, `linear`, `llama3`, `yarn`; the other fields are read by the kinds that name them.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a pre-norm decoder with grouped-query attention, rotary positions and a gated feed-forward."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one per layer; None attends to everything before
    hidden_act: str = "silu"
    kv_copies: int = 1  # times that each of the checkpoint's KV heads is in `num_kv_heads`, for more devices than heads
    dtype: str = "bfloat16"  # of weights and activations; norms, softmax and logits are f32
