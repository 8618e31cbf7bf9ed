"""A model in several GGUF files is the one that a single file holds, whichever of them names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGUFWriter

from penstock.cli.checks.model import check_model
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.loading.gguf.parts import names_of_parts
from penstock.engine.loading.identity import identify
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.engines import write_model
from tests.engine.loading.gguf_files import q4_k_m, write_gguf

SPLITS: Mapping[str, Mapping[str, Any]] = {
    "all with tensors": {"split_max_tensors": 8},
    "the first with metadata alone": {"split_max_tensors": 12, "small_first_shard": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    write_model(folder / "model", "llama", **sizes)
    return write_gguf(folder / "model.gguf", folder / "model", q4_k_m)


@pytest.fixture(scope="module", params=SPLITS)
def parts(request: pytest.FixtureRequest, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    checkpoint = shutil.copytree(whole.parent / "model", folder / "model")
    write_gguf(folder / "model.gguf", checkpoint, q4_k_m, split=SPLITS[request.param])
    written = sorted(folder.glob("*.gguf"))
    assert len(written) > 2
    return written


def arrays(file: Path) -> dict[Any, np.ndarray]:
    model = load_model(file, read_model_config(file))
    leaves, _ = jax.tree.flatten_with_path(nnx.state(model))
    return {path: np.asarray(leaf) for path, leaf in leaves}


def identity(path: Path) -> Any:
    tokenizer = Tokenizer.from_dir(path)
    return identify(path, tokenizer.templates, tokenizer.rules())


def test_the_model_is_that_of_a_single_file(whole: Path, parts: list[Path]) -> None:
    expected, found = arrays(whole), arrays(parts[0])
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))
    assert {each.file for each in open_checkpoint(parts[0]).stored.values()} <= set(parts)
    assert [each.status for each in check_model(str(parts[0]), "auto")] == [
        each.status for each in check_model(str(whole), "auto")
    ]


def test_any_part_and_the_folder_name_the_same_model(parts: list[Path]) -> None:
    first = open_checkpoint(parts[0])
    for path in (*parts[1:], parts[0].parent):
        found = open_checkpoint(path)
        assert (found.path, found.config_name) == (first.path, first.config_name)
        assert (found.fields, found.stored) == (first.fields, first.stored)
        assert identity(path) == identity(parts[0])


def test_the_digest_depends_on_each_part_and_not_on_their_names(parts: list[Path], tmp_path: Path) -> None:
    named = [tmp_path / part.name.replace("model-", "other-") for part in parts]
    for part, copy in zip(parts, named, strict=True):
        shutil.copy(part, copy)
    digest = identity(parts[0]).weights
    assert identity(named[0]).weights == digest
    data = bytearray(named[-1].read_bytes())
    data[-1] ^= 1
    named[-1].write_bytes(data)
    assert identity(named[0]).weights != digest


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m.gguf", ["m.gguf"]),
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("a/b/m-00001-of-00002.gguf", ["a/b/m-00001-of-00002.gguf", "a/b/m-00002-of-00002.gguf"]),
        ("m-00001-of-00001.gguf", ["m-00001-of-00001.gguf"]),
        ("m-00001-of-00000.gguf", ["m-00001-of-00000.gguf"]),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"]),
        ("m-00001-of-00002.bin", ["m-00001-of-00002.bin"]),
    ],
)
def test_names_of_parts(name: str, expected: list[str]) -> None:
    assert names_of_parts(name) == expected


# What is wrong with parts: each case changes three small ones that only their headers tell from sound ones.
COUNT = 3


def write_part(
    folder: Path, number: int, *, tensor: str = "", name: str = "", num_tensors: int = COUNT, **stated: Any
) -> Path:
    file = folder / (name or f"model-{number:05}-of-{COUNT:05}.gguf")
    writer = GGUFWriter(file, "llama")
    for key, value in {"no": number - 1, "count": COUNT, "tensors.count": num_tensors, **stated}.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(f"split.{key}", value)
    writer.add_tensor(tensor or f"blk.{number}.ffn_up.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def without(*numbers: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for number in numbers:
            (folder / f"model-{number:05}-of-00003.gguf").unlink()

    return change


WRONG: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "one is missing": (
        without(1),
        "model-00002-of-00003.gguf is one of 3 files of a model; not beside it: model-00001-of-00003.gguf",
    ),
    "two are missing": (
        without(1, 3),
        "model-00002-of-00003.gguf is one of 3 files of a model; not beside it: model-00001-of-00003.gguf and 1 more",
    ),
    "another's count": (
        lambda folder: write_part(folder, 3, count=5),
        "model-00003-of-00003.gguf has split.no = 2 and split.count = 5, expected 2 and 3",
    ),
    "another's number": (
        lambda folder: write_part(folder, 3, no=1),
        "model-00003-of-00003.gguf has split.no = 1 and split.count = 3, expected 2 and 3",
    ),
    "the own count is not the name's": (
        lambda folder: write_part(folder, 2, count=5),
        "model-00002-of-00003.gguf has split.count = 5; the name of such a file ends in its number and their count",
    ),
    "no count": (
        lambda folder: write_part(folder, 2, count="x"),
        "model-00002-of-00003.gguf has split.count = 'x'; the name of such a file ends in its number and their count",
    ),
    "a tensor twice": (
        lambda folder: write_part(folder, 3, tensor="blk.1.ffn_up.weight"),
        "model-00003-of-00003.gguf and model-00001-of-00003.gguf both have tensor 'blk.1.ffn_up.weight'",
    ),
    "too few tensors": (
        lambda folder: write_part(folder, 1, num_tensors=4),
        "model-00001-of-00003.gguf has split.tensors.count = 4, and the 3 files hold 3",
    ),
    "another one cut short": (
        lambda folder: (folder / "model-00003-of-00003.gguf").write_bytes(b"GGUF"),
        "model-00003-of-00003.gguf has 4 bytes, too few for a GGUF file",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_make_no_model(tmp_path: Path, case: str) -> None:
    for number in range(1, COUNT + 1):
        write_part(tmp_path, number)
    change, says = WRONG[case]
    change(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path / "model-00002-of-00003.gguf")
    assert says in str(refused.value)


def test_a_part_under_another_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"odd\.gguf has split\.count = 3; the name of such a file ends in"):
        open_checkpoint(write_part(tmp_path, 2, name="odd.gguf"))


def test_a_folder_of_two_models_must_be_told_apart(tmp_path: Path, whole: Path, parts: list[Path]) -> None:
    for file in (whole, *parts):
        shutil.copy(file, tmp_path / file.name)
    with pytest.raises(CheckpointError, match=rf"holds {len(parts) + 1} GGUF files, .* name the one to load"):
        open_checkpoint(tmp_path)
