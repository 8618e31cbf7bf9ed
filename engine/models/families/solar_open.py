"""Solar Open (Upstage, 2026): Llama's attention, and GLM-4.5's experts in every layer."""

from __future__ import annotations

from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import QWEN_EXPERTS, Family
from penstock.engine.models.families.glm4_moe import GLM4_MOE, SHARED_EXPERTS
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.experts import read_sigmoid_experts
from penstock.engine.models.hf.rope import read_partial_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(config, rope=read_partial_rope, qkv_bias=config.flag("attention_bias"))
    blocks = full_layers(config, BlockConfig(attention, read_sigmoid_experts(config), norm))
    return read_model(config, family=SOLAR_OPEN.model_type, dtype=dtype, blocks=blocks, norm=norm)


SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        "vocab_size": 196_608,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    configure=_configure,
    own_modules={**QWEN_EXPERTS, **SHARED_EXPERTS},
    own_tensors=GLM4_MOE.own_tensors,
)
