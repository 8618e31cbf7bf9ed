"""VaultGemma (Google, 2025): Gemma 2's blocks, with norms before attention and feed-forward only."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.gemma2 import GEMMA2
from penstock.engine.models.hf.config import HFConfig


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    model = GEMMA2.configure(config, dtype)
    blocks = tuple(replace(block, norm_placement="before") for block in model.blocks)
    return replace(model, family=VAULTGEMMA.model_type, blocks=blocks)


VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    configure=_configure,
    own_modules={("mlp_norm",): "pre_feedforward_layernorm"},
)
