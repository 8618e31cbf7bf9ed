"""Qwen2-VL and Qwen2.5-VL (Wang et al., arXiv 2409.12191; Bai et al., arXiv 2502.13923): a Qwen2 beside a vision tower.

Rotary positions have three axes. A text moves all of them together, so they are those of a Qwen2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.models.families.family import BESIDE_VISION, Family, ModelPlace
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.families.text_part import text_part
from penstock.engine.models.hf.config import HFConfig, text_fields

QWEN_VL_PLACES = (ModelPlace(), *BESIDE_VISION)


def _fields(config: HFConfig) -> Mapping[str, Any]:
    """Returns the fields of the text part. Published checkpoints have them beside `vision_config`, not in a table."""
    if config.get("text_config") is None:
        fields = {name: value for name, value in config.fields.items() if name not in ("model_type", "text_config")}
    else:
        inner, outer = HFConfig(config.get("text_config"), {}), text_fields(config)
        is_tied = config.flag("tie_word_embeddings") or inner.flag("tie_word_embeddings")
        fields = {**outer, "tie_word_embeddings": is_tied}
    tables = ("rope_scaling", "rope_parameters")
    return {name: _of_text(value) if name in tables else value for name, value in fields.items()}


def _of_text(table: object) -> object:
    """Returns a table of rotary parameters, with the plain rope for `mrope`."""
    if not isinstance(table, dict) or (table.get("rope_type") or table.get("type")) != "mrope":
        return table
    return {**table, "rope_type": "default"}


def _text(model_type: str) -> Family:
    defaults = {
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "max_window_layers": 80,
    }
    return replace(QWEN2, model_type=model_type, defaults=defaults)


def _beside_vision(model_type: str, architecture: str) -> Family:
    return text_part(
        model_type,
        _text(f"{model_type}_text"),
        architecture=architecture,
        parts=("visual.",),
        places=QWEN_VL_PLACES,
        fields_of=_fields,
    )


QWEN2_VL = _beside_vision("qwen2_vl", "Qwen2VLForConditionalGeneration")
QWEN2_5_VL = _beside_vision("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
