"""A model over several devices gives the same tokens, with two all-reduces per layer and every weight split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.engine.models import ModelConfig
from penstock.engine.sharding.placement import split_model
from penstock.tools.plan import preset
from tests.engine.attention.kv_scale_checkpoints import random_scales, with_scales
from tests.engine.engines import write_model
from tests.engine.sharding.devices import Runs, once, run_models
from tests.support.patience import slow

pytestmark = pytest.mark.versions

LAYERS = 2
OfModel = Callable[[str], dict[str, dict[str, Any]]]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("1,8", {"num_attention_heads": 8}),
    "padded": ("1,2,4", {"num_attention_heads": 8, "vocab_size": 1003, "tie_word_embeddings": True}),
    "normed": ("1,4", {"family": "olmo2"}),
    "fused": (
        "1,4",
        {
            "family": "phi3",
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.8],
                "long_factor": [1.0, 2.0, 2.5, 3.0, 5.0, 9.0],
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "parallel": ("1,2", {"family": "cohere2", "seed": 1, "sliding_window": 9, "sliding_window_pattern": 2}),
    "int8 pages": ("1,2", {}),
    "fp8 pages": ("1,2,4", {}),
    "around": ("1,2", {"family": "glm4", "head_dim": 20}),
}
"""Models, with the numbers of devices on which each runs.

They have two KV heads, so four and eight devices hold copies of them. No number of devices divides the vocabulary of
one. The norms of another go over the queries and keys of all heads. Tensors of a third hold queries, keys and values,
and its rotary positions follow from a sequence's length. One has int8 pages, one fp8 pages with scales that the
checkpoint has for each KV head.
"""


QUICK = ("padded", "normed", "parallel", "fp8 pages")  # the others run in `make test-slow`


@pytest.fixture(scope="module")
def runs(run_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> OfModel:
    """Runs of a model by number of devices. Quick models share a process; the others share another."""

    @cache
    def run(is_quick: bool) -> Runs:
        names = [name for name in MODELS if (name in QUICK) == is_quick]
        kept = run_directory / ("tensor_parallel" if is_quick else "tensor_parallel_slow")
        return once(kept, lambda: run_models({name: (write(name), MODELS[name][0]) for name in names}))

    def write(name: str) -> Path:
        path = write_model(tmp_path_factory.mktemp(name), num_hidden_layers=LAYERS, **MODELS[name][1])
        if name != "fp8 pages":
            return path
        return with_scales(path, tmp_path_factory.mktemp(name), random_scales(LAYERS, (2,)))

    return lambda name: run(name in QUICK)[name]


def split_of(models: Iterable[str]) -> list[Any]:
    """Pairs each model with each number of devices above one."""
    return [case(model, tensor) for model in models for tensor in MODELS[model][0].split(",")[1:]]


def case(model: str, tensor: str) -> Any:
    return (model, tensor) if model in QUICK else slow(model, tensor)


split = pytest.mark.parametrize(("model", "tensor"), split_of(MODELS))


@split
def test_several_devices_give_the_tokens_of_one(runs: OfModel, model: str, tensor: str) -> None:
    """Padding of the vocabulary is never drawn, moves no draw and is in no sum of probabilities."""
    alone, together = runs(model)["1"], runs(model)[tensor]
    assert together["tokens"] == alone["tokens"]
    assert all(len(tokens) == 12 for tokens in alone["tokens"])
    assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


def test_a_split_has_another_arithmetic_and_other_bits_of_some_models(runs: OfModel) -> None:
    has_other_bits = []
    for model in QUICK:
        for together in list(runs(model).values())[1:]:
            assert together["arithmetic"] != runs(model)["1"]["arithmetic"]
            has_other_bits.append(together["logprobs"] != runs(model)["1"]["logprobs"])
    assert any(has_other_bits)


@pytest.mark.parametrize(("model", "tensor"), split_of(model for model in MODELS if model != "normed"))
def test_a_layer_talks_twice_and_the_embedding_once(runs: OfModel, model: str, tensor: str) -> None:
    talks = 1 if model == "parallel" else 2  # XLA joins the two of a layer that does both at once
    assert runs(model)[tensor]["all_reduces"] == talks * LAYERS + 1


@split
def test_nothing_is_gathered(runs: OfModel, model: str, tensor: str) -> None:
    """Norms over the queries and keys of all heads gather nothing either: their sums of squares are added up."""
    assert runs(model)[tensor]["other_collectives"] == 0


@split
def test_every_matrix_and_the_cache_are_split(runs: OfModel, model: str, tensor: str) -> None:
    assert runs(model)[tensor]["weight_shares"] == [int(tensor)]
    assert runs(model)[tensor]["cache_shares"] == [int(tensor)]


def llama_8b() -> ModelConfig:
    model = preset("llama-3.1-8b")
    assert model is not None
    return model


def test_kv_heads_are_copied_where_devices_outnumber_them() -> None:
    split = split_model(llama_8b(), 16)
    assert {(block.attention.num_kv_heads, block.attention.kv_copies) for block in split.blocks} == {(16, 2)}
    assert split_model(split, 16) == split


def test_a_split_that_does_not_come_out_even_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the model's 32 attention heads; 1, 2, 4"):
        split_model(llama_8b(), 3)
