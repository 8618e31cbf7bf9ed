"""OLMo 2 (arXiv 2501.00656): norms after attention and feed-forward, and over the queries and keys of all heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig, NormConfig, RopeConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.hf.blocks import full_layers, read_attention, read_mlp, read_model, read_norm
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.hf.rope import read_rope

OLMO2_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
)
OLMO2_MODULES: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("attention", "q_projection_norm"): "self_attn.q_norm",
        ("attention", "k_projection_norm"): "self_attn.k_norm",
        ("attention_out_norm",): "post_attention_layernorm",
        ("mlp_out_norm",): "post_feedforward_layernorm",
    }
)


def olmo2_norm(config: HFConfig) -> NormConfig:
    return replace(read_norm(config), scales_in_f32=True)


def olmo2_block(config: HFConfig, rope: Callable[[HFConfig, int], RopeConfig] = read_rope) -> BlockConfig:
    has_bias, norm = config.flag("attention_bias"), olmo2_norm(config)
    attention = read_attention(config, rope=rope, qkv_bias=has_bias, out_bias=has_bias)
    attention = replace(attention, qk_projection_norm=norm)
    return BlockConfig(attention, read_mlp(config), norm, norm_placement="after")


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block, norm = olmo2_block(config), olmo2_norm(config)
    blocks = full_layers(config, block)
    return read_model(config, family=OLMO2.model_type, dtype=dtype, blocks=blocks, norm=norm)


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=OLMO2_DEFAULTS,
    configure=_configure,
    own_modules=OLMO2_MODULES,
)
