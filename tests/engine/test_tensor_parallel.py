"""A model over several devices: the same tokens, two all-reduces per layer, every weight split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import write_model
from patience import WAIT_S

from penstock.engine.errors import ConfigError
from penstock.engine.models import ModelConfig
from penstock.engine.planning import preset
from penstock.engine.sharding import split_model

LAYERS = 2

Runs = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By model and number of devices. The models have two KV heads, so four and eight devices hold copies of them, and
    devices divide the vocabulary of one only.
    """
    whole, padded = (tmp_path_factory.mktemp(name) for name in ("whole", "padded"))
    write_model(whole, num_attention_heads=8, num_hidden_layers=LAYERS)
    write_model(padded, num_attention_heads=8, num_hidden_layers=LAYERS, vocab_size=1003, tie_word_embeddings=True)
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{here.parent.parent}{os.pathsep}{here}",
    }
    command = [sys.executable, str(here / "tensor_parallel_process.py"), f"{whole}:1,2,8", f"{padded}:1,2,4"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    found = zip(("whole", "padded"), map(json.loads, outcome.stdout.splitlines()), strict=True)
    return {(model, tensor): run for model, by_tensor in found for tensor, run in by_tensor.items()}


split = pytest.mark.parametrize(
    ("model", "tensor"), [("whole", "2"), ("whole", "4"), ("whole", "8"), ("padded", "2"), ("padded", "4")]
)


@split
def test_several_devices_give_the_tokens_of_one(runs: Runs, model: str, tensor: str) -> None:
    """Padding of the vocabulary is never drawn, moves no draw and is in no sum of probabilities."""
    alone, together = runs[model, "1"], runs[model, tensor]
    assert together["tokens"] == alone["tokens"]
    assert all(len(tokens) == 12 for tokens in alone["tokens"])
    assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


@split
def test_a_layer_talks_twice_and_the_embedding_once(runs: Runs, model: str, tensor: str) -> None:
    assert runs[model, tensor]["all_reduces"] == 2 * LAYERS + 1
    assert runs[model, tensor]["other_collectives"] == 0


@split
def test_every_matrix_and_the_cache_are_split(runs: Runs, model: str, tensor: str) -> None:
    assert runs[model, tensor]["weight_shares"] == [int(tensor)]
    assert runs[model, tensor]["cache_shares"] == [int(tensor)]


def llama_8b() -> ModelConfig:
    model = preset("llama-3.1-8b")
    assert model is not None
    return model


def test_kv_heads_are_copied_where_devices_outnumber_them() -> None:
    split = split_model(llama_8b(), 16)
    assert (split.num_kv_heads, {block.attention.kv_copies for block in split.blocks}) == (16, {2})
    assert split_model(split, 16) == split


def test_a_split_that_does_not_come_out_even_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the model's 32 attention heads; 1, 2, 4"):
        split_model(llama_8b(), 3)
