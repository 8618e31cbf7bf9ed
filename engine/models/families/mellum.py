"""Mellum 2 (JetBrains, 2026): Qwen3's mixtures of experts, with windows that have a rope of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.engine.models.config import BlockConfig, ExpertsConfig, ModelConfig
from penstock.engine.models.families.qwen3_moe import QWEN3_MOE
from penstock.engine.models.hf.blocks import blocks_by_type, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_experts, typed_layers
from penstock.engine.models.hf.rope import FULL, SLIDING, read_rope_of


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        HFConfig(config.fields, {}).refuse_unless(name, None)  # transformers ignores it
    experts = _experts(config)
    full, local = (_block(config, layer_type, experts) for layer_type in (FULL, SLIDING))
    mlps = typed_layers(config, read_mlp(config), experts, num_dense=0)
    pairs = zip(blocks_by_type(config, full, local, full_every=1), mlps, strict=True)
    blocks = [replace(block, mlp=mlp) for block, mlp in pairs]
    return read_model(config, family=MELLUM.model_type, dtype=dtype, blocks=blocks, norm=read_norm(config))


def _block(config: HFConfig, layer_type: str, experts: ExpertsConfig) -> BlockConfig:
    has_bias, norm = config.flag("attention_bias"), read_norm(config)
    rope = partial(read_rope_of, layer_type)
    attention = read_attention(config, rope=rope, qkv_bias=has_bias, out_bias=has_bias, qk_norm=norm)
    return BlockConfig(attention, experts, norm)


def _experts(config: HFConfig) -> ExpertsConfig:
    return read_experts(
        config,
        "num_experts",
        "num_local_experts",
        intermediate_size="moe_intermediate_size",
        normalized=config.flag("norm_topk_prob"),
    )


MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    architecture="MellumForCausalLM",
    defaults={
        "vocab_size": 98_304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": True,
    },
    configure=_configure,
    passed_over=("mtp.",),
)
