"""MiniMax-M2 (MiniMax, 2025): norms over the queries and keys of all heads, and experts with a sigmoid router."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig, RopeConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.mixtral import MIXTRAL
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts
from penstock.engine.models.hf.rope import read_partial_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    attention = replace(read_attention(config, rope=_rope), qk_projection_norm=norm)
    experts = read_experts(
        config, "num_local_experts", "num_experts", intermediate_size="intermediate_size", normalized=True
    )
    block = BlockConfig(attention, replace(experts, scores="sigmoid", has_correction=True), norm)
    blocks = full_layers(config, block)
    return read_model(config, family=MINIMAX_M2.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope. Published checkpoints state how many features rotate, as `rotary_dim`."""
    if config.get("rotary_dim") is not None:
        share = config.integer("rotary_dim") / head_dim
        config = replace(config, fields={"partial_rotary_factor": share, **config.fields})
    return read_partial_rope(config, head_dim)


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    configure=_configure,
    own_modules={
        **MIXTRAL.own_modules,
        ("attention", "q_projection_norm"): "self_attn.q_norm",
        ("attention", "k_projection_norm"): "self_attn.k_norm",
    },
    own_tensors={("mlp", "correction"): "block_sparse_moe.e_score_correction_bias"},
)
