"""Quantized models over several devices give the same tokens, with no more communication than unquantized ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import Packing
from penstock.engine.sharding.placement import split_model
from penstock.tools.plan import preset
from tests.engine.engines import EOS, VOCAB_SIZE, write_model
from tests.engine.formats.quantized_checkpoints import MXFP4_EXPERTS, write_quantized
from tests.engine.formats.quantized_weights import SCHEMES, Scheme
from tests.engine.loading.gguf_files import all_of, write_gguf
from tests.engine.sharding.devices import Runs, once, run_models, run_on_devices
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level
from tests.support.patience import slow

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MIXTURE = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 4, "num_experts_per_tok": 2}
MIXTURES = [*SCHEMES, *(f"w8a8 {name}" for name in SCHEMES if "int8" in name or "8 bits" in name)]
FIRST = ("w8a8 compressed int8", "compressed fp8 tensor")
"""The formats of experts that the default suite splits: one scale for a row or an expert, of weights or activations."""

MODELS: dict[str, tuple[Scheme, str, str, dict[str, Any]]] = {
    # two heads share a block of rows, and devices hold copies of them
    "dense fp8": (
        SCHEMES["fp8 blocks"],
        "qwen3",
        "1,4",
        {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64},
    ),
    # each of four devices has half of a group: scales stay whole
    "dense gptq": (SCHEMES["gptq in order"], "llama", "1,4", {"hidden_size": 256, "intermediate_size": 384}),
    "gpt-oss mxfp4": (MXFP4_EXPERTS, "gpt_oss", "1,2", {"hidden_size": 64, "intermediate_size": 128, **EXPERTS}),
    **{
        name: (
            SCHEMES[name.removeprefix("w8a8 ")],
            "qwen3_moe",
            "1,2,2x2" if name in FIRST else "1,2,4,1x2,2x2",
            MIXTURE,
        )
        for name in MIXTURES
    },
}
"""Models, with the layouts of devices on which each runs."""

QUICK = ("dense fp8", *FIRST)  # the others run in `make test-slow`
OfModel = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(run_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> OfModel:
    """Runs of a model by layout. Quick models share a process."""

    def write(name: str) -> tuple[Path, str]:
        scheme, family, layouts, geometry = MODELS[name]
        folder = tmp_path_factory.mktemp("quantized")
        quantized, _ = write_quantized(folder, scheme, family, bos_token_id=None, **HEADS, **geometry)
        byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(quantized)
        return quantized, layouts

    @cache
    def quick() -> Runs:
        return once(run_directory / "quantized_parallel", lambda: run_models({name: write(name) for name in QUICK}))

    return lambda name: quick()[name] if name in QUICK else run_models({name: write(name)}, may_be_refused=True)[name]


def quick_or_slow(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else slow(name) for name in names]


@pytest.mark.parametrize("model", quick_or_slow(name for name in MODELS if name not in MIXTURES))
def test_several_devices_give_the_tokens_of_one(runs: OfModel, model: str) -> None:
    alone, together = runs(model).values()
    assert together["tokens"] == alone["tokens"]
    if model != "dense gptq":  # its scales are gathered if a feature is in a group of another device
        assert together["other_collectives"] == alone["other_collectives"] == 0
    assert max(together["weight_shares"]) == (2 if model == "gpt-oss mxfp4" else 4)


@pytest.mark.slow
def test_a_gguf_file_is_divided_by_rows_as_they_should_be(tmp_path: Path) -> None:
    """Rows of queries and keys are put in order, and the quantized embedding is padded to 274 tokens."""
    geometry = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True, **HEADS}
    folder = write_model(tmp_path / "folder", "llama", **{**geometry, "vocab_size": 273})
    runs = run_on_devices(write_gguf(tmp_path / "model.gguf", folder, all_of("Q8_0")), "1,2")
    assert runs["2"]["tokens"] == runs["1"]["tokens"]
    assert max(runs["2"]["weight_shares"]) == 2


@pytest.mark.parametrize("name", quick_or_slow(MIXTURES))
def test_a_mixture_of_any_format_gives_the_tokens_of_one_device(runs: OfModel, name: str) -> None:
    """Only experts whose features are in groups in any order cannot be split."""
    found = runs(name)
    refused = {layout: run["refused"] for layout, run in found.items() if "refused" in run}
    assert refused.keys() == ({"2", "4", "2x2"} if name == "gptq in order" else set()), refused
    assert all("cuts groups of the quantized experts" in message for message in refused.values()), refused
    assert all(run["tokens"] == found["1"]["tokens"] for layout, run in found.items() if layout not in refused)


def test_devices_that_would_cut_the_groups_of_experts_are_refused() -> None:
    model = preset("Qwen3-30B-A3B", "bfloat16")
    assert model is not None
    packed = ((("mlp", "experts", "down"), Packing("int4", 128, offset="zeros")),)
    quantized = replace(model, blocks=tuple(replace(block, packed=packed) for block in model.blocks))
    assert split_model(quantized, 2).blocks[0].packed == packed
    assert split_model(quantized, 1, 4).blocks[0].packed == packed
    with pytest.raises(ConfigError, match="tensor_parallel = 4 cuts groups of the quantized experts: 192 features"):
        split_model(quantized, 4)
