"""gpt-oss (OpenAI, arXiv 2508.10925): attention sinks, every other layer with a window, experts with biases."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ClampedSwiGLU, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import listed_layers, read_attention, read_model, read_norm, sliding
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    config.refuse_unless("hidden_act", "silu")
    if config.get("rope_parameters") is None:  # null means absent
        config = replace(config, fields={**config.fields, "rope_parameters": config.defaults["rope_parameters"]})
    has_bias, norm = config.flag("attention_bias"), replace(read_norm(config), scales_in_f32=True)
    attention = replace(read_attention(config, qkv_bias=has_bias, out_bias=has_bias), sinks=True)
    experts = read_experts(
        config, "num_local_experts", "num_experts", intermediate_size="intermediate_size", normalized=True
    )
    clamped = ClampedSwiGLU(alpha=config.number("swiglu_alpha"), limit=config.number("swiglu_limit"))
    block = BlockConfig(attention, replace(experts, clamped=clamped, bias=True), norm)
    window = config.optional_integer("sliding_window")
    blocks = sliding(block, listed_layers(config, window, lambda layer: layer % 2 == 0))
    return read_model(config, family=GPT_OSS.model_type, dtype=dtype, blocks=blocks, norm=norm)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    configure=_configure,
    own_tensors={
        ("attention", "sinks"): "self_attn.sinks",
        ("mlp", "router", "kernel"): "mlp.router.weight",
        ("mlp", "router", "bias"): "mlp.router.bias",
        ("mlp", "experts", "gate", "kernel"): GATE_UP,
        ("mlp", "experts", "up", "kernel"): GATE_UP,
        ("mlp", "experts", "gate", "bias"): f"{GATE_UP}_bias",
        ("mlp", "experts", "up", "bias"): f"{GATE_UP}_bias",
        ("mlp", "experts", "down", "kernel"): DOWN,
        ("mlp", "experts", "down", "bias"): f"{DOWN}_bias",
    },
    turns=dict.fromkeys((GATE_UP, f"{GATE_UP}_bias"), lambda block: block.mlp.intermediate_size),
    plain=frozenset({GATE_UP, DOWN}),
)
