"""GLM-4 and GLM-Z1 (Z.ai, 2025): norms around attention and feed-forward; half of each head rotates, in neighbours."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import BlockConfig, ModelConfig, RopeConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf_blocks import every_layer, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf_config import HFConfig
from penstock.engine.models.hf_rope import read_partial_rope


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    norm = read_norm(config)
    attention = read_attention(config, rope=_rope, qkv_bias=config.flag("attention_bias"))
    block = BlockConfig(attention, read_mlp(config), norm, "around")
    blocks = [block for _ in every_layer(config, None)]
    return read_model(config, family=GLM4.model_type, dtype=dtype, blocks=blocks, norm=norm)


def _rope(config: HFConfig, head_dim: int) -> RopeConfig:
    return replace(read_partial_rope(config, head_dim), interleaved=True)


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    configure=_configure,
    own_modules={
        ("attention_out_norm",): "post_self_attn_layernorm",
        ("mlp_out_norm",): "post_mlp_layernorm",
        ("mlp", "gate"): "mlp.gate_up_proj",
        ("mlp", "up"): "mlp.gate_up_proj",
    },
)
