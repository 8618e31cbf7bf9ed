"""Gemma 3 (arXiv 2503.19786): norms of queries and keys; five of six layers have a window and a rope of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.gemma import gemma_attention, gemma_model, gemma_norm
from penstock.engine.models.families.gemma2 import GEMMA2_DEFAULTS, NORMS_AROUND
from penstock.engine.models.families.text_part import text_part
from penstock.engine.models.hf.blocks import blocks_by_type, read_mlp
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import FULL, SLIDING, read_rope_of


def _block(config: HFConfig, layer_type: str) -> BlockConfig:
    norm = gemma_norm(config)
    attention = replace(
        gemma_attention(config, rope=partial(read_rope_of, layer_type), qk_norm=norm),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
    )
    mlp = read_mlp(config, activation="hidden_activation")
    return BlockConfig(attention, mlp, norm, norm_placement="around")


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("attn_logit_softcapping", None)  # transformers ignores it
    full, local = (_block(config, layer_type) for layer_type in (FULL, SLIDING))
    blocks = blocks_by_type(config, full, local, config.integer("sliding_window_pattern"))
    model = gemma_model(config, GEMMA3_TEXT.model_type, dtype, blocks)
    return replace(model, logit_soft_cap=config.optional_number("final_logit_softcapping"))


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA2_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    configure=_configure,
    own_modules={
        **NORMS_AROUND,
        ("attention", "q_norm"): "self_attn.q_norm",
        ("attention", "k_norm"): "self_attn.k_norm",
    },
)

GEMMA3 = text_part(
    "gemma3",
    GEMMA3_TEXT,
    architecture="Gemma3ForConditionalGeneration",
    ignored=("final_logit_softcapping",),
)
