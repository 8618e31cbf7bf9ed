"""HyperCLOVA X SEED (NAVER Cloud, 2025): Granite's blocks, with norms after attention and feed-forward too."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig, NormPlacement
from penstock.engine.models.families.granite import GRANITE, granite_block, granite_model
from penstock.engine.models.hf.blocks import full_layers, read_mlp
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    block = granite_block(config, read_mlp(config, bias=config.flag("mlp_bias")))
    placement: NormPlacement = "around" if config.flag("use_post_norm") else "before"
    blocks = full_layers(config, replace(block, norm_placement=placement))
    model = granite_model(config, HYPERCLOVAX.model_type, dtype, blocks)
    return replace(model, logit_scale=config.number("logits_scaling"))  # Granite divides by it


HYPERCLOVAX = replace(
    GRANITE,
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    defaults={**GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    configure=_configure,
    own_modules={("attention_out_norm",): "post_norm1", ("mlp_out_norm",): "post_norm2"},
)
