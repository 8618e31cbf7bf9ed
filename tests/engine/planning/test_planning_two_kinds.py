"""Plans of Gemma 4: pages of two kinds, counted by hand, and steps that move little more when compiled for TPUs."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.shared.planning import _show
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.models import FAMILIES, ModelConfig, layer_groups, num_parameters
from penstock.tools.plan import as_dict, preset
from penstock.tools.plan.device.roofline import kv_bytes_moved, kv_sequence_bytes
from penstock.tools.plan.device.weights import held_bytes, step_weight_bytes
from tests.engine.planning.plans import plan
from tests.support.needs import needs_libtpu
from tests.support.patience import slow

BF16 = 2
NARROW = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 4096,
    "vocab_size_per_layer_input": 4096,
    "sliding_window": 512,
}
PATTERN = ["sliding_attention", "full_attention"]
MODELS = {
    "dense": {**NARROW, "layer_types": PATTERN * 3, "num_hidden_layers": 6, "num_global_key_value_heads": 2}
    | {"attention_k_eq_v": True},
    "small": {**NARROW, "layer_types": PATTERN * 4, "num_hidden_layers": 8, "num_kv_shared_layers": 4}
    | {"hidden_size_per_layer_input": 256, "use_double_wide_mlp": True},
}
SETTINGS = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=8192, tensor_parallel=4)


def known(name: str) -> ModelConfig:
    model = preset(name)
    assert model is not None
    return model


def narrow(name: str) -> ModelConfig:
    return FAMILIES["gemma4_text"].config(MODELS[name], "bfloat16")


def test_pages_and_weights_of_the_large_one_by_hand() -> None:
    """Fifty layers have 16 KV heads of 256 and a window of 1,024; ten have 4 of 512, whose values are keys."""
    model, hidden = known("Gemma-4-31B"), 5376
    assert [(kind.num_kv_heads, kind.head_dim, kind.size) for kind in layer_groups(model).page_kinds] == [
        (16, 256, 50),
        (4, 512, 10),
    ]
    sliding, full = 2 * 16 * 256 * BF16, 2 * 4 * 512 * BF16
    assert kv_sequence_bytes(model, "bfloat16", 500) == 500 * (50 * sliding + 10 * full)
    assert kv_sequence_bytes(model, "bfloat16", 32768) == 50 * 1024 * sliding + 10 * 32768 * full
    of_sliding = hidden * (32 + 16 + 16 + 32) * 256 + 2 * 256
    of_full = hidden * (32 + 4 + 32) * 512 + 2 * 512
    rest = 3 * hidden * 21504 + 4 * hidden + 1
    count = 50 * of_sliding + 10 * of_full + 60 * rest + 262144 * hidden + hidden
    assert num_parameters(model) == count
    assert held_bytes(model, None) == BF16 * count
    deployment = deploy(EngineConfig(page_size=64, max_model_len=32768, attention="xla"), model)
    assert deployment.needs.num_groups == 2
    assert deployment.kind_bytes == (64 * 50 * sliding * 2, 64 * 10 * full * 2)  # f32 in this form for CPUs


def test_the_small_one_reads_a_row_of_its_tables() -> None:
    model = narrow("small")
    table = 4096 * 8 * 256 * BF16
    read = step_weight_bytes(model, 3, None)
    assert held_bytes(model, None) - read == table - 3 * BF16 * (8 * 256 + 1024)
    assert layer_groups(model).page_kinds[0].size == 2  # two of four such layers read another's
    placed = deploy(EngineConfig(page_size=64, max_model_len=4096, attention="xla"), model)
    sliding, full = 2 * 4 * 256 * 4, 2 * 4 * 512 * 4
    # Pages of 64 tokens up to the one behind 1,000 others, in four layers each, and one more token in two of each kind.
    moved = 4 * (1024 - 448) * sliding + 4 * 1024 * full + 2 * sliding + 2 * full
    assert kv_bytes_moved(placed, 1000) == moved


@needs_libtpu
@pytest.mark.parametrize("name", ["dense", slow("small")])
def test_narrow_ones_compile_and_copy_no_pages(name: str) -> None:
    made = plan(narrow(name), "v6e:2x2", SETTINGS, context=4096, only=frozenset({16}))
    step = made.buckets[0]
    assert made.cache_is_aliased
    assert step.layer_collectives == {"all-reduce": 2}
    assert step.temporary_bytes < made.weight_bytes / 4
    assert made.needs.bounded_kinds == {0}
    assert made.num_sequences(8192) == min(made.pages.counts[0] // 9, made.pages.counts[1] // 128)
    kinds = as_dict(made)["pages"]["kinds"]
    assert [kind["count"] for kind in kinds] == list(made.pages.counts)
    assert [kind["head_dim"] for kind in kinds] == [256, 512]
    screen = Console(record=True, width=200, file=io.StringIO())
    _show(screen, made)
    text = screen.export_text()
    assert f"at once in {made.pages.counts[0] - 1:,} and {made.pages.counts[1] - 1:,} pages" in text
    assert "KV heads of 256 that see 512 tokens; " in text
    assert "KV heads of 512 that see everything." in text
    for decode in made.decode:
        assert decode.overhead < 1.15


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "split"),
    [
        ("Gemma-4-31B", "v6e:2x2", {"tensor_parallel": 4}),
        ("Gemma-4-31B", "v5e:2x4", {"tensor_parallel": 8}),
        ("Gemma-4-26B-A4B", "v6e:2x2", {"tensor_parallel": 1, "expert_parallel": 4}),
        ("Gemma-4-26B-A4B", "v5e:2x4", {"tensor_parallel": 1, "expert_parallel": 8}),
    ],
)
def test_decode_steps_move_little_more_than_they_must(name: str, topology: str, split: dict[str, Any]) -> None:
    made = plan(known(name), topology, replace(SETTINGS, **split), context=4096, only=frozenset({16}))
    assert made.cache_is_aliased
    assert [step.num_tokens for step in made.decode] == [1, 16]
    for decode in made.decode:
        assert decode.overhead <= 1.15
