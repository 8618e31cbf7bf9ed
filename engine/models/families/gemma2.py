"""Gemma 2 (arXiv 2408.00118): norms around attention and feed-forward, soft caps, every second layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.gemma import DEFAULTS, gemma_attention, gemma_model, gemma_norm
from penstock.engine.models.hf.blocks import blocks_by_type, read_mlp
from penstock.engine.models.hf.config import HFConfig

GEMMA2_DEFAULTS = MappingProxyType(
    {
        **DEFAULTS,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }
)
NORMS_AROUND: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("attention_out_norm",): "post_attention_layernorm",
        ("mlp_norm",): "pre_feedforward_layernorm",
        ("mlp_out_norm",): "post_feedforward_layernorm",
    }
)


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    attention = replace(
        gemma_attention(config),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=config.optional_number("attn_logit_softcapping"),
    )
    mlp = read_mlp(config, activation="hidden_activation")
    block = BlockConfig(attention, mlp, gemma_norm(config), norm_placement="around")
    model = gemma_model(config, GEMMA2.model_type, dtype, blocks_by_type(config, block, block, full_every=2))
    return replace(model, logit_soft_cap=config.optional_number("final_logit_softcapping"))


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={**GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    configure=_configure,
    own_modules=NORMS_AROUND,
)
