"""Experts out of checkpoints: a tensor each or one for all, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from flax import nnx
from safetensors.numpy import load_file, save_file

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import Decoder

NUM_EXPERTS = 3
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), "mixtral", num_local_experts=NUM_EXPERTS)


def changed(sound: Path, directory: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of the sound checkpoint with other tensors."""
    (directory / "config.json").write_text((sound / "config.json").read_text())
    tensors = load_file(sound / "model.safetensors")
    edit(tensors)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")
    return directory


def load(directory: Path, *, stacked: bool = False) -> Decoder:
    return load_model(directory, read_model_config(directory), stacked=stacked)


def parameters(model: Decoder) -> dict[Any, np.ndarray]:
    return {path: np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(model))}


def fuse(tensors: Tensors) -> None:
    """As transformers holds them in memory."""
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            np.stack([tensors.pop(f"{old}.experts.{expert}.{name}.weight") for expert in range(NUM_EXPERTS)])
            for name in ("w1", "w2", "w3")
        )
        tensors[f"{new}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        tensors[f"{new}.experts.down_proj"] = w2
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")


def test_each_expert_arrives_at_its_place(sound: Path) -> None:
    stored = load_file(sound / "model.safetensors")
    experts = load(sound).blocks[1].mlp.experts
    for name, linear in (("w1", experts.gate), ("w2", experts.down), ("w3", experts.up)):
        for expert in range(NUM_EXPERTS):
            of_file = stored[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"]
            np.testing.assert_array_equal(linear.kernel[expert], of_file.T)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_a_layer_may_be_one_tensor(sound: Path, stacked: bool, tmp_path: Path) -> None:
    expected = parameters(load(sound, stacked=stacked))
    found = parameters(load(changed(sound, tmp_path, fuse), stacked=stacked))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


def test_stacked_layers_hold_what_single_ones_do(sound: Path) -> None:
    single, stacked = load(sound), load(sound, stacked=True)
    for path, array in nnx.to_flat_state(nnx.state(stacked.blocks[0])):
        layers = [dict(nnx.to_flat_state(nnx.state(block)))[path][...] for block in single.blocks]
        np.testing.assert_array_equal(array[...], np.stack(layers), err_msg=str(path))


W1 = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
W2_OF_A_FOURTH = "model.layers.0.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(W1), f"lacks tensors of the model: {W1}"),
        (
            lambda tensors: tensors.update({W2_OF_A_FOURTH: np.ones((48, 64), np.float32)}),
            f"no place for: {W2_OF_A_FOURTH}",
        ),
        (lambda tensors: tensors.update({W1: tensors[W1].T}), rf"{W1} has shape \[48, 64\], expected \[64, 48\]"),
        (lambda tensors: tensors.update({W1: tensors[W1].astype(np.int32)}), f"{W1} is of type I32"),
    ],
    ids=["missing", "surplus", "misshapen", "integers"],
)
def test_a_wrong_expert_is_named(sound: Path, edit: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(changed(sound, tmp_path, edit))


def test_fused_experts_of_another_number_are_named(sound: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        fuse(tensors)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name][:2]

    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape \[2, 48, 64\], expected \[3, 48, 64\]"):
        load(changed(sound, tmp_path, edit))
