from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.loading.checkpoint import load_model, random_model, read_model_config
from penstock.engine.models import FAMILIES, Decoder
from tests.engine.checkpoints import VOCAB_SIZE, edit_config, write_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), "qwen3", head_dim=16)


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound checkpoint, to be broken."""
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(directory: Path, dtype: str = "auto") -> Decoder:
    return load_model(directory, read_model_config(directory, dtype))


def change(file: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file)


def parameters(model: Decoder, family: str) -> dict[str, np.ndarray]:
    """Returns the parameters by the checkpoint's names, in its layout."""
    named = {}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(param[...])
        named[FAMILIES[family].tensor_name(cast("tuple[str | int, ...]", path))] = (
            array.T if path[-1] == "kernel" else array
        )
    return named


def test_every_tensor_arrives_where_it_belongs(sound: Path) -> None:
    stored = load_file(sound / "model.safetensors")
    loaded = parameters(load(sound), "qwen3")
    assert loaded.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_keep_the_type_on_disk(dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", dtype=dtype)
    edit_config(tmp_path, "dtype")  # so that it is read from the weights
    loaded = parameters(load(tmp_path), "llama")
    for name, array in load_file(tmp_path / "model.safetensors").items():
        assert loaded[name].dtype == array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_weights_are_rounded_to_the_type_that_is_asked_for(sound: Path) -> None:
    loaded = parameters(load(sound, "bfloat16"), "qwen3")
    for name, array in load_file(sound / "model.safetensors").items():
        np.testing.assert_array_equal(loaded[name], array.astype(ml_dtypes.bfloat16), err_msg=name)


def test_shards_are_all_read_and_progress_counts_their_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2", shards=3)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    seen: list[tuple[int, int, str]] = []
    model = load_model(tmp_path, read_model_config(tmp_path), lambda *progress: seen.append(progress))
    stored = {name: array for shard in shards for name, array in load_file(shard).items()}
    loaded = parameters(model, "qwen2")
    assert loaded.keys() == stored.keys()
    assert all(np.array_equal(loaded[name], stored[name]) for name in stored)
    total = sum(array.nbytes for array in stored.values())
    assert seen[-1] == (total, total, "weights")
    assert [done for done, *_ in seen] == sorted({done for done, *_ in seen})


def test_known_extras_are_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)

    change(tmp_path / "model.safetensors", edit)
    assert load(tmp_path).head is None


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("body", ["language_model.model", "model.language_model"])
def test_a_language_model_is_found_beside_a_vision_tower(body: str, is_tied: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3", head_dim=16, tie_word_embeddings=is_tied)
    as_written = parameters(load(tmp_path), "gemma3")
    renamed = {"language_model.model.": f"{body}.", "language_model.lm_head.": "lm_head."}

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            old = next((prefix for prefix in renamed if name.startswith(prefix)), "")
            new = renamed.get(old, "model.") if body == "model.language_model" else old
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    change(tmp_path / "model.safetensors", rename)
    loaded = parameters(load(tmp_path), "gemma3")
    assert loaded.keys() == as_written.keys()
    assert all(np.array_equal(loaded[name], as_written[name]) for name in loaded)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen_vl_is_read_as_it_was_published(
    family: str, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published text parts have neither a table nor a prefix of their own, and their rope has another name."""
    write_checkpoint(tmp_path, family, tie_word_embeddings=is_tied)
    as_written = parameters(load(tmp_path), family)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 1e6}
    left_out = ("model_type", "rope_parameters", "layer_types", "tie_word_embeddings")
    flat = {name: value for name, value in text.items() if name not in left_out}
    edit_config(tmp_path, "text_config", **flat, **rope, tie_word_embeddings=is_tied)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            published = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
            tensors[published] = tensors.pop(name)

    change(tmp_path / "model.safetensors", rename)
    caplog.set_level("INFO")
    loaded = parameters(load(tmp_path), family)
    assert loaded.keys() == as_written.keys()
    assert all(np.array_equal(loaded[name], as_written[name]) for name in loaded)
    assert "tensors are not part of the text model and stay unread: visual." in caplog.text


@pytest.mark.parametrize("name", ["audio_tower.conv.weight", "vision_towers.weight", "language_model.model.extra"])
def test_what_is_no_part_of_a_vision_tower_is_not_passed_over(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3", head_dim=16)
    change(tmp_path / "model.safetensors", lambda tensors: tensors.update({name: np.ones(3)}))
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)
    missing = "language_model.model.layers.1.self_attn.q_norm.weight"
    change(tmp_path / "model.safetensors", lambda tensors: [tensors.pop(gone) for gone in (name, missing)])
    with pytest.raises(CheckpointError, match=missing):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("gemma2", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("gemma3_text", "model.layers.1.self_attn.q_norm.weight"),
        ("olmo2", "model.layers.1.self_attn.k_norm.weight"),
        ("olmo3", "model.layers.1.post_feedforward_layernorm.weight"),
        ("exaone4", "model.layers.1.post_attention_layernorm.weight"),
        ("cohere2", "model.layers.1.input_layernorm.weight"),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
        ("glm", "model.layers.1.mlp.gate_up_proj.weight"),
        ("glm4", "model.layers.1.post_mlp_layernorm.weight"),
        ("seed_oss", "model.layers.1.self_attn.k_proj.bias"),
        ("mistral3", "language_model.model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_tensors_of_a_familys_own_must_be_there_with_their_shape(family: str, tensor: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {} if family == "phi3" else {"head_dim": 12}
    write_checkpoint(tmp_path, family, **sizes)
    file = tmp_path / "model.safetensors"
    surplus = tensor.replace("layers.1", "layers.7")
    change(file, lambda tensors: tensors.update({surplus: tensors[tensor]}))
    with pytest.raises(CheckpointError, match=rf"no place for: {surplus} \(model"):
        load(tmp_path)
    change(file, lambda tensors: tensors.update({tensor: tensors.pop(surplus)[:-1]}))
    with pytest.raises(CheckpointError, match=rf"{tensor} has shape"):
        load(tmp_path)
    change(file, lambda tensors: tensors.pop(tensor))
    with pytest.raises(CheckpointError, match=rf"lacks tensors of the model: {tensor}"):
        load(tmp_path)


def test_parts_beside_the_tensor_that_holds_them_all_have_no_place(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "phi3")
    change(tmp_path / "model.safetensors", lambda tensors: tensors.update({Q_PROJ: np.ones((48, 48), np.float32)}))
    with pytest.raises(CheckpointError, match=rf"no place for: {Q_PROJ}"):
        load(tmp_path)


def test_a_tied_head_with_weights_of_its_own_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    change(
        tmp_path / "model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in model\.safetensors differs"):
        load(tmp_path)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change(directory / "model.safetensors", lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=Q_PROJ):
        load(directory)


def test_layers_that_are_not_there_are_named_before_a_structure_is_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nnx, "eval_shape", lambda *_: pytest.fail("that takes long"))
    edit_config(directory, "layer_types", num_hidden_layers=1000)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers = 1000, the checkpoint lacks: model\.layers\.10\.s"):
        load(directory)


def test_an_unexpected_tensor_is_named_with_its_file(directory: Path) -> None:
    change(directory / "model.safetensors", lambda tensors: tensors.update({"model.extra.weight": np.ones(3)}))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight \(model\.safetensors\)"):
        load(directory)


def test_a_misshapen_tensor_is_named_with_both_shapes_and_the_file(directory: Path) -> None:
    change(directory / "model.safetensors", lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} has shape \[48, 64\], expected \[64, 48\], in model.safeten"):
        load(directory)


def test_a_tensor_of_integers_is_named_with_its_type(directory: Path) -> None:
    change(directory / "model.safetensors", lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype(np.int8)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} is of type I8, expected one of .*, in model.safetensors"):
        load(directory)


def test_nothing_is_read_before_all_is_checked(directory: Path) -> None:
    change(directory / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_model(directory, read_model_config(directory), lambda *_: pytest.fail("a weight was read"))


def test_a_truncated_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load(directory)


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(directory)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path, "llama", shards=3)

    def test_missing_shard(self, sharded: Path) -> None:
        shard = min(sharded.glob("model-*.safetensors"))
        shard.unlink()
        with pytest.raises(CheckpointError, match=shard.name):
            load(sharded)

    def test_tensor_that_its_shard_does_not_hold(self, sharded: Path) -> None:
        shard = edit_index(
            sharded, lambda weight_map: weight_map.update({"model.ghost.weight": min(weight_map.values())})
        )
        with pytest.raises(CheckpointError, match=rf"{shard}.*model\.ghost\.weight"):
            load(sharded)

    def test_tensor_that_the_index_leaves_out(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.pop(Q_PROJ))
        with pytest.raises(CheckpointError, match=Q_PROJ):
            load(sharded)

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd"])
    def test_file_outside_the_directory(self, sharded: Path, name: str) -> None:
        edit_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: name}))
        with pytest.raises(CheckpointError, match=name):
            load(sharded)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
    def test_malformed(self, sharded: Path, content: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            load(sharded)


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> str:
    """Changes the weight map; returns the name of the first shard."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))
    return str(min(index["weight_map"].values()))


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\xff"])
def test_a_config_that_is_missing_or_malformed(directory: Path, content: str | None) -> None:
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(directory)


def test_dtype_on_disk_is_kept_unless_another_is_asked_for(directory: Path) -> None:
    edit_config(directory, "dtype", torch_dtype="float16")
    assert read_model_config(directory).dtype == "float16"
    assert read_model_config(directory, "bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="int8"):
        read_model_config(directory, "int8")


def test_random_models_have_the_geometry_and_follow_the_seed(sound: Path) -> None:
    config = read_model_config(sound, "bfloat16")
    first, again, other = (parameters(random_model(config, seed), "qwen3") for seed in (1, 1, 2))
    expected = {name: array.shape for name, array in load_file(sound / "model.safetensors").items()}
    assert {name: array.shape for name, array in first.items()} == expected
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first[Q_PROJ], other[Q_PROJ])
    assert not np.array_equal(first[Q_PROJ], first[Q_PROJ.replace("1", "0")])
    assert 0.015 < np.asarray(first["model.embed_tokens.weight"], np.float32).std() < 0.025
    assert np.all(first["model.norm.weight"] == 1)
    assert first["model.embed_tokens.weight"].shape[0] == VOCAB_SIZE
