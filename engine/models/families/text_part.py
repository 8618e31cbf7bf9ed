"""The text part of a model that also takes images or sound: a model of another family, inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.family import BESIDE_VISION, Family, ModelPlace, text_family
from penstock.engine.models.hf.config import HFConfig, text_fields


def text_part(
    model_type: str,
    *texts: Family,
    architecture: str,
    parts: tuple[str, ...] = ("vision_tower.", "multi_modal_projector."),
    places: tuple[ModelPlace, ...] = BESIDE_VISION,
    ignored: tuple[str, ...] = (),
    fields_of: Callable[[HFConfig], Mapping[str, Any]] = text_fields,
) -> Family:
    """Returns the family of models whose text part is one of `texts`: the first, unless `text_config` names another.

    Tensors whose names begin with one of `parts` are never read. Fields of the text part that transformers ignores in
    such a model are `ignored`: they are refused. `fields_of` reads the fields of the text part.
    """

    def configure(config: HFConfig, dtype: str) -> ModelConfig:
        fields = fields_of(config)
        for name in ignored:
            HFConfig(fields, {}).refuse_unless(name, None, False)
        text = text_family(model_type, texts, fields)
        return replace(text.config(fields, dtype), family=model_type)

    family = replace(
        texts[0],
        model_type=model_type,
        architecture=architecture,
        defaults={},
        configure=configure,
        places=places,
        passed_over=tuple(f"{prefix}{part}" for prefix in ("", "model.") for part in parts),
        texts=texts,
    )
    return family.with_text_of({})
