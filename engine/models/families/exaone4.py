"""EXAONE 4 (LG AI Research, arXiv 2507.11407): norms after attention and feed-forward, and of queries and keys.

If any layers have windows, those with full attention have no positional encoding.
"""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import (
    blocks_by_type,
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    without_positions,
)
from penstock.engine.models.hf.config import HFConfig


def exaone4_blocks(config: HFConfig) -> list[BlockConfig]:
    norm = read_norm(config)
    local = BlockConfig(read_attention(config, qk_norm=norm), read_mlp(config), norm, norm_placement="after")
    full = local if config.get("sliding_window") is None else without_positions(local)
    # With `layer_types` the pattern is ignored; some checkpoints have letters there.
    full_every = 1 if config.get("layer_types") is not None else config.integer("sliding_window_pattern")
    return blocks_by_type(config, full, local, full_every)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    blocks, norm = exaone4_blocks(config), read_norm(config)
    return read_model(config, family=EXAONE4.model_type, dtype=dtype, blocks=blocks, norm=norm)


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    configure=_configure,
    own_modules={
        ("attention", "q_norm"): "self_attn.q_norm",
        ("attention", "k_norm"): "self_attn.k_norm",
        ("attention_out_norm",): "post_attention_layernorm",
        ("mlp_out_norm",): "post_feedforward_layernorm",
    },
)
