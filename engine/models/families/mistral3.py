"""Mistral Small 3.1 and Ministral 3 as published: a Mistral, or a Ministral 3, beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import BESIDE_VISION, VISION_TENSORS
from penstock.engine.models.families.ministral3 import MINISTRAL3
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.hf.config import HFConfig, text_fields


def _configure(config: HFConfig, dtype: str) -> ModelConfig:
    """Reads only the text part."""
    fields = text_fields(config)
    of_text = fields.get("model_type", MISTRAL.model_type)
    family = next((family for family in (MISTRAL, MINISTRAL3) if family.model_type == of_text), None)
    if family is None:
        raise ConfigError(f"config.json: model_type = {shown(of_text)} in text_config is not supported")
    return replace(family.config(fields, dtype), family=MISTRAL3.model_type)


MISTRAL3 = replace(
    MISTRAL,
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    defaults={},
    configure=_configure,
    places=BESIDE_VISION,
    passed_over=VISION_TENSORS,
)
