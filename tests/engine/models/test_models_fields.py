"""Every field of a family's configuration class in transformers is read, or known to change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.engine.errors import ConfigError
from penstock.engine.models import FAMILIES

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
    "num_mtp_layers",  # for drafting
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


BESIDE_IMAGES = ("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe")  # they read a `text_config`
ALONE = sorted(name for name in FAMILIES if name not in BESIDE_IMAGES)


@pytest.mark.parametrize("family", ALONE)
def test_no_field_of_transformers_is_passed_over(family: str) -> None:
    asked: set[str] = set()
    for more in ({}, {"use_sliding_window": True}, WITH_EXPERTS):  # fields that say whether others count
        fields = Recorded({**BASE, **more})
        FAMILIES[family].config(fields, "float32")
        asked |= fields.asked
    assert fields_of(family).keys() - asked == NEXT_TO_OTHERS.get(family, set())


@pytest.mark.parametrize("family", ALONE)
def test_a_field_that_is_left_out_is_what_transformers_takes_it_for(family: str) -> None:
    ours = FAMILIES[family].defaults
    for name, field in fields_of(family).items():
        theirs = field.default
        if name in ours and name != "rope_parameters":
            assert ours[name] == theirs, name
        elif name not in REQUIRED:
            assert theirs in (None, False, 0), name


@pytest.mark.parametrize("family", ALONE)
@pytest.mark.parametrize(
    ("name", "value"), [("is_causal", False), ("attention_chunk_size", 8), ("kv_sharing_modes", ["own"] * 4)]
)
def test_what_would_change_any_family_is_refused(family: str, name: str, value: object) -> None:
    FAMILIES[family].config({**BASE, "is_causal": True, "attention_chunk_size": None}, "float32")
    with pytest.raises(ConfigError, match=name):
        FAMILIES[family].config({**BASE, name: value}, "float32")


@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2", "granite", "glm", "glm4", "seed_oss", "ernie4_5"])
def test_a_window_where_a_family_knows_none_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="sliding_window = 5"):
        FAMILIES[family].config({**BASE, "sliding_window": 5}, "float32")
