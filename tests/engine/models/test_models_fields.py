"""Every field of a family's configuration class in transformers is read, or known to change nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from penstock.engine.errors import ConfigError
from penstock.engine.models import FAMILIES, family_of
from penstock.engine.models.families.unserved import UNSERVED

BASE = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "vocab_size_per_layer_input": 10,
}
WITH_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8}
HARMLESS = {
    # of every class, and read elsewhere or by nothing
    *(field.name for field in dataclasses.fields(PretrainedConfig)),
    *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "initializer_range", "pretraining_tp"),
    # for training
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
    *("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),  # for drafting
    "enable_moe_fp32_combine",  # sums are in f32 here
}
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
NEXT_TO_OTHERS = {"phi3": {"original_max_position_embeddings"}}  # read where a rope asks for it


class Recorded(Mapping[str, Any]):
    """Fields of a config.json that remember which of them were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.asked: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return name in self._fields

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def fields_of(family: str) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of the class in transformers that can change what a model computes."""
    return {field.name: field for field in dataclasses.fields(CONFIG_MAPPING[family]) if field.name not in HARMLESS}


# Of a model that takes images too, the text part.
TEXTS = {text.model_type: text for family in FAMILIES.values() for text in family.texts or (family,)}
ALONE = sorted(TEXTS)


@pytest.mark.parametrize("family", ALONE)
def test_no_field_of_transformers_is_passed_over(family: str) -> None:
    asked: set[str] = set()
    for more in ({}, {"use_sliding_window": True}, WITH_EXPERTS):  # fields that say whether others count
        fields = Recorded({**BASE, **more})
        TEXTS[family].config(fields, "float32")
        asked |= fields.asked
    assert fields_of(family).keys() - asked == NEXT_TO_OTHERS.get(family, set())


@pytest.mark.parametrize("family", ALONE)
def test_a_field_that_is_left_out_is_what_transformers_takes_it_for(family: str) -> None:
    ours = TEXTS[family].defaults
    for name, field in fields_of(family).items():
        theirs = field.default
        if name in ours and name != "rope_parameters":
            assert ours[name] == theirs, name
        elif name not in REQUIRED and (family in FAMILIES or name != "tie_word_embeddings"):  # that stands outside
            assert theirs in (None, False, 0), name


@pytest.mark.parametrize("family", ALONE)
@pytest.mark.parametrize(
    ("name", "value"), [("is_causal", False), ("attention_chunk_size", 8), ("kv_sharing_modes", ["own"] * 4)]
)
def test_what_would_change_any_family_is_refused(family: str, name: str, value: object) -> None:
    TEXTS[family].config({**BASE, "is_causal": True, "attention_chunk_size": None}, "float32")
    with pytest.raises(ConfigError, match=name):
        TEXTS[family].config({**BASE, name: value}, "float32")


FULL = "llama gemma olmo2 granite glm glm4 seed_oss ernie4_5 internlm3 iquestcoder helium cohere hyperclovax minimax_m2"


@pytest.mark.parametrize("family", FULL.split())
def test_a_window_where_a_family_knows_none_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="sliding_window = 5"):
        TEXTS[family].config({**BASE, "sliding_window": 5}, "float32")


def test_each_model_type_of_transformers_is_served_or_refused_with_what_it_needs() -> None:
    registered = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert registered - FAMILIES.keys() == UNSERVED.keys()
    for model_type, part in UNSERVED.items():
        with pytest.raises(ConfigError, match=f"model type '{model_type}'.*; it needs {re.escape(part)}"):
            family_of({"model_type": model_type})
