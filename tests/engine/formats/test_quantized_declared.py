"""In every format, config.json and the files must agree on the quantization, or nothing is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.checks.model import check_model
from penstock.engine.errors import CheckpointError, EngineError
from penstock.engine.formats.detection import FORMATS, quant_method, read_format
from penstock.engine.formats.kv_cache import read_kv_cache_scheme
from penstock.engine.loading.checkpoint import check_weights, read_model_config
from tests.engine.checkpoints import edit_config, write_checkpoint
from tests.engine.formats.quantized_checkpoints import MXFP4_EXPERTS, save, tensors_of, write_quantized
from tests.engine.formats.quantized_weights import SCHEMES

ALL = {**SCHEMES, "mxfp4": MXFP4_EXPERTS}
GEOMETRY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "head_dim": 32,
    "hidden_size": 64,
}
ONE_EACH = {str(scheme.fields["quant_method"]): name for name, scheme in ALL.items()}
NONE_IS = "and no weight of the checkpoint is stored so"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format."""
    found = {}
    for name in ONE_EACH.values():
        family, geometry = ("gpt_oss", EXPERTS) if name == "mxfp4" else ("llama", {})
        directory = tmp_path_factory.mktemp("of_format")
        found[name] = write_quantized(directory, ALL[name], family, **{**GEOMETRY, **geometry})[0]
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by family, one with experts."""
    directory = tmp_path_factory.mktemp("plain")
    return {
        "llama": write_checkpoint(directory / "llama", "llama", **GEOMETRY),
        "gpt_oss": write_checkpoint(directory / "gpt_oss", "gpt_oss", **{**GEOMETRY, **EXPERTS}),
    }


def copied(checkpoint: Path, to: Path, **fields: Any) -> Path:
    copy = Path(shutil.copytree(checkpoint, to))
    edit_config(copy, **fields)
    return copy


def test_every_format_is_there() -> None:
    assert ONE_EACH.keys() == FORMATS.keys()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("name", ALL)
def test_plain_weights_are_refused_where_a_format_is_declared(
    tmp_path: Path, plain: dict[str, Path], family: str, name: str
) -> None:
    fields = dict(ALL[name].fields)
    declared = copied(plain[family], tmp_path / "model", quantization_config=fields)
    with pytest.raises(CheckpointError, match=f"quant_method = '{fields['quant_method']}', {NONE_IS}"):
        read_model_config(declared)
    (found,) = (finding for finding in check_model(str(declared), "auto") if finding.name == "model")
    assert (found.status, NONE_IS in found.detail) == ("fail", True)


@pytest.mark.parametrize("method", FORMATS)
def test_quantized_weights_are_refused_where_none_is_declared(
    tmp_path: Path, quantized: dict[str, Path], method: str
) -> None:
    copy = Path(shutil.copytree(quantized[ONE_EACH[method]], tmp_path / "model"))
    edit_config(copy, "quantization_config")
    with pytest.raises(CheckpointError, match=r"weights are quantized, and config\.json has no quantization_config"):
        check_weights(copy, read_model_config(copy))


@pytest.mark.parametrize("declared", FORMATS)
@pytest.mark.parametrize("stored", FORMATS)
def test_weights_of_one_format_are_refused_where_another_is_declared(
    tmp_path: Path, quantized: dict[str, Path], stored: str, declared: str
) -> None:
    fields = dict(ALL[ONE_EACH[declared]].fields)
    copy = copied(quantized[ONE_EACH[stored]], tmp_path / "model", quantization_config=fields)
    if stored == declared:
        assert check_weights(copy, read_model_config(copy)) > 0
    else:
        with pytest.raises(EngineError):
            check_weights(copy, read_model_config(copy))


LISTS = {
    "compressed-tensors": {"ignore": [DOWN]},
    "awq": {"modules_to_not_convert": [DOWN]},
    "fp8": {"modules_to_not_convert": [DOWN]},
}


@pytest.mark.parametrize("method", sorted(FORMATS.keys() - {"mxfp4"}))
def test_a_weight_that_is_plain_in_one_layer_must_be_listed(
    tmp_path: Path, quantized: dict[str, Path], plain: dict[str, Path], method: str
) -> None:
    copy = Path(shutil.copytree(quantized[ONE_EACH[method]], tmp_path / "model"))
    tensors = {name: held for name, held in tensors_of(copy / "model.safetensors").items() if not name.startswith(DOWN)}
    tensors[f"{DOWN}.weight"] = tensors_of(plain["llama"] / "model.safetensors")[f"{DOWN}.weight"]
    save(copy / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"'{method}', and weights of some layers are stored otherwise: {DOWN}"):
        read_model_config(copy)
    if method in LISTS:
        fields = json.loads((copy / "config.json").read_text())["quantization_config"]
        edit_config(copy, quantization_config={**fields, **LISTS[method]})
        assert check_weights(copy, read_model_config(copy)) > 0


@pytest.mark.parametrize("name", ALL)
def test_what_stands_among_the_fields_of_a_text_model_is_read(name: str) -> None:
    outer = {"quantization_config": dict(ALL[name].fields)}
    assert read_format({"model_type": "gemma3", "text_config": outer}) == read_format(outer)
    assert quant_method({"text_config": outer}) == quant_method(outer) == outer["quantization_config"]["quant_method"]


def test_a_scheme_for_the_cache_among_the_fields_of_a_text_model_is_read() -> None:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    outer = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    found = read_kv_cache_scheme({"text_config": outer})
    assert found is not None
    assert found == read_kv_cache_scheme(outer)
