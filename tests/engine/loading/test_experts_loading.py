"""Experts are loaded from one tensor each or one for all; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import FAMILIES, Decoder
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import present
from penstock.engine.sharding.placement import split_model
from tests.engine.checkpoints import write_checkpoint

NUM_EXPERTS = 3
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), "mixtral", num_local_experts=NUM_EXPERTS)


def changed(sound: Path, directory: Path, edit: Callable[[Tensors], object]) -> Path:
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
    """Stacks the experts' weights as transformers holds them in memory."""
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            np.stack([tensors.pop(f"{old}.experts.{expert}.{name}.weight") for expert in range(NUM_EXPERTS)])
            for name in ("w1", "w2", "w3")
        )
        tensors[f"{new}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        tensors[f"{new}.experts.down_proj"] = w2
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")


def _add(weights: Tensors, tensors: Tensors) -> None:
    tensors.update(weights)


def test_each_expert_arrives_at_its_place(sound: Path) -> None:
    stored = load_file(sound / "model.safetensors")
    mlp = load(sound).blocks[1].mlp
    assert isinstance(mlp, Experts)
    experts = mlp.experts
    for name, linear in zip(("w1", "w3", "w2"), present(experts.gate, experts.up, experts.down), strict=True):
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


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("edit", [fuse, lambda tensors: None], ids=["fused", "a tensor each"])
def test_padding_stands_behind_the_experts_and_is_zero(
    sound: Path, edit: Callable[[Tensors], object], stacked: bool, tmp_path: Path
) -> None:
    directory = changed(sound, tmp_path, edit)
    config, whole = read_model_config(directory), parameters(load(sound, stacked=stacked))
    padded = parameters(load_model(directory, split_model(config, 1, 2), stacked=stacked))
    for path, array in padded.items():
        if "experts" in path:
            axis = int(stacked)
            np.testing.assert_array_equal(array.take(range(NUM_EXPERTS), axis), whole[path])
            assert array.shape[axis] == NUM_EXPERTS + 1
            assert not array.take(NUM_EXPERTS, axis).any()


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


SINKS, GATE_UP = "model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(SINKS), f"lacks tensors of the model: {SINKS}"),
        (lambda tensors: tensors.update({SINKS: tensors[SINKS][:3]}), rf"{SINKS} has shape \[3\], expected \[4\]"),
        (lambda tensors: tensors.pop(f"{GATE_UP}_bias"), f"lacks tensors of the model: {GATE_UP}_bias"),
        (
            lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP].swapaxes(1, 2)}),
            rf"{GATE_UP} has shape \[4, 128, 48\], expected \[4, 48, 128\]",
        ),
        (
            lambda tensors: tensors.update({f"{GATE_UP}_blocks": np.ones((4, 128, 3, 16), np.uint8)}),
            f"no place for: {GATE_UP}_blocks",
        ),
    ],
    ids=["no sinks", "too few sinks", "no biases", "transposed", "blocks beside values"],
)
def test_a_wrong_tensor_of_gpt_oss_is_named(edit: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    oss = write_checkpoint(tmp_path / "sound", "gpt_oss")
    (tmp_path / "changed").mkdir()
    with pytest.raises(CheckpointError, match=message):
        load(changed(oss, tmp_path / "changed", edit))


def test_fused_experts_of_another_number_are_named(sound: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        fuse(tensors)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name][:2]

    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape \[2, 48, 64\], expected \[3, 48, 64\]"):
        load(changed(sound, tmp_path, edit))


def test_what_is_beside_the_text_of_qwen3_5_is_passed_over_and_nothing_else(tmp_path: Path) -> None:
    sound = write_checkpoint(tmp_path / "sound", "qwen3_5_moe")
    beside = {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "model.visual.merger.norm.weight"}
    for number, names in enumerate((beside, {"model.language_model.mtp.fc.weight"})):
        directory = tmp_path / str(number)
        directory.mkdir()
        weights = dict.fromkeys(names, np.ones(3, np.float32))
        changed(sound, directory, partial(_add, weights))
    assert len(load(tmp_path / "0").blocks) == 2
    with pytest.raises(CheckpointError, match=r"no place for: model\.language_model\.mtp\.fc\.weight"):
        load(tmp_path / "1")


def test_experts_of_qwen3_vl_are_read_whichever_way_they_are_stored(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    sound = write_checkpoint(tmp_path / "sound", "qwen3_vl_moe", **sizes)

    def publish(tensors: Tensors) -> None:
        """Stores experts as the published checkpoints do, with the input first."""
        for name in tensors:
            if ".experts." in name:
                tensors[name] = tensors[name].swapaxes(1, 2)

    (tmp_path / "published").mkdir()
    published = changed(sound, tmp_path / "published", publish)
    expected, loaded = parameters(load(sound)), parameters(load(published))
    assert loaded.keys() == expected.keys()
    assert all(np.array_equal(loaded[path], expected[path]) for path in expected)


def test_layers_for_drafting_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sound = write_checkpoint(tmp_path / "sound", "glm4_moe", num_nextn_predict_layers=2, **sizes)
    drafted, beyond = (f"model.layers.{layer}.eh_proj.weight" for layer in (3, 4))
    weights = np.ones((2, 3), np.float32)
    directories = [tmp_path / name for name in ("drafted", "beyond")]
    for directory in directories:
        directory.mkdir()
    loaded = load(changed(sound, directories[0], lambda tensors: tensors.update({drafted: weights})))
    assert len(loaded.blocks) == 2
    with pytest.raises(CheckpointError, match=f"no place for: {beyond}"):
        load(changed(sound, directories[1], lambda tensors: tensors.update({beyond: weights})))


@pytest.mark.parametrize(("family", "place"), [("gemma4_text", "experts"), ("gpt_oss", "mlp.experts")])
def test_experts_with_tensors_of_their_own_are_named_where_the_family_has_them(family: str, place: str) -> None:
    stored = {f"model.layers.0.{place}.0.gate_proj.weight"}
    name = FAMILIES[family].as_stored(stored).tensor_name(("blocks", 0, "mlp", "experts", "gate", "kernel"))
    assert {name.format(0)} == stored
