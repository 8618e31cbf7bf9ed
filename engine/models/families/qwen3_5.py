"""Qwen3.5 and Qwen3.6 (Qwen, 2026): Qwen3-Next's layers, dense or with experts; published beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import BESIDE_VISION, Family, ModelPlace
from penstock.engine.models.families.qwen3_next import (
    DEFAULTS_OF_HYBRID,
    EXPERTS_OF_HYBRID,
    MODULES_OF_HYBRID,
    TENSORS_OF_HYBRID,
    TURNS_OF_HYBRID,
    delta_hybrid,
    with_shared,
)
from penstock.engine.models.families.text_part import text_part
from penstock.engine.models.hf.blocks import read_mlp
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts

_IN = "linear_attn.in_proj_qkv"
_MODULES = {
    **MODULES_OF_HYBRID,
    ("recurrence", "q"): _IN,
    ("recurrence", "k"): _IN,
    ("recurrence", "v"): _IN,
    ("recurrence", "gate"): "linear_attn.in_proj_z",
    ("recurrence", "beta"): "linear_attn.in_proj_b",
    ("recurrence", "decay"): "linear_attn.in_proj_a",
}
_PARTS = ("mtp.", "visual.")
_PLACES = (ModelPlace(), *BESIDE_VISION)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    mlps = [read_mlp(config)] * config.integer("num_hidden_layers")
    return delta_hybrid(config, QWEN3_5_TEXT.model_type, dtype, mlps)


def _configure_moe(config: HFConfig, dtype: str) -> ModelConfig:
    experts = read_experts(config, "num_experts", intermediate_size="moe_intermediate_size", normalized=True)
    mlps = [with_shared(config, experts)] * config.integer("num_hidden_layers")
    return delta_hybrid(config, QWEN3_5_MOE_TEXT.model_type, dtype, mlps)


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={
        **DEFAULTS_OF_HYBRID,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    configure=_configure,
    own_modules=_MODULES,
    own_tensors=TENSORS_OF_HYBRID,
    turns=TURNS_OF_HYBRID,
    places=_PLACES,
    passed_over=("mtp.", "visual.", "model.visual."),
)

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **DEFAULTS_OF_HYBRID,
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    configure=_configure_moe,
    own_modules={**_MODULES, **EXPERTS_OF_HYBRID},
)

QWEN3_5 = text_part(
    "qwen3_5",
    QWEN3_5_TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    places=_PLACES,
    parts=_PARTS,
)
QWEN3_5_MOE = text_part(
    "qwen3_5_moe",
    QWEN3_5_MOE_TEXT,
    architecture="Qwen3_5MoeForConditionalGeneration",
    places=_PLACES,
    parts=_PARTS,
)
