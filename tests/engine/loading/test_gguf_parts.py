"""Any single part of a split GGUF model is refused as such, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from penstock.cli.checks.model import check_model
from penstock.engine.errors import ConfigError
from penstock.engine.loading.source import open_checkpoint

COUNT = 3
MERGE = "merge them: llama-gguf-split --merge model-00001-of-00003.gguf model.gguf"


def part(number: int, of: Path) -> Path:
    return of / f"model-{number:05}-of-{COUNT:05}.gguf"


def write_part(file: Path, number: int, count: Any = COUNT) -> Path:
    """Writes one part as llama-gguf-split does: only the first one says what the model is."""
    writer = GGUFWriter(file, "llama")
    if number > 1:
        del writer.kv_data[0]["general.architecture"]
    if isinstance(count, int):
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", count)
    else:
        writer.add_string("split.count", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [write_part(part(number, tmp_path), number) for number in range(1, COUNT + 1)]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        open_checkpoint(path)
    found = check_model(str(path), "auto")[0]
    assert (found.status, found.detail) == ("fail", str(refused.value))
    assert "download the checkpoint again" not in found.fix
    return found.detail


@pytest.mark.parametrize("number", range(1, COUNT + 1))
def test_each_part_says_which_one_it_is_and_how_to_merge_them(parts: list[Path], number: int) -> None:
    file = parts[number - 1]
    assert refusal(file) == f"{file.name} is part {number} of 3 files that a model is split into; {MERGE}"


def test_a_folder_of_parts_says_so(tmp_path: Path, parts: list[Path]) -> None:
    assert refusal(tmp_path) == refusal(parts[0])


@pytest.mark.parametrize(
    ("gone", "lacks"), [((1,), "00001-of-00003.gguf of"), ((1, 3), "00001-of-00003.gguf and 1 more")]
)
def test_parts_that_are_not_there_are_named(
    tmp_path: Path, parts: list[Path], gone: tuple[int, ...], lacks: str
) -> None:
    for number in gone:
        parts[number - 1].unlink()
    message = refusal(parts[1])
    assert f"model-{lacks}" in message
    assert message.endswith(f"not beside it; get them, then {MERGE}")


def test_a_name_that_says_another_count_is_told(tmp_path: Path) -> None:
    message = refusal(write_part(part(2, tmp_path), 2, count=5))
    assert "is part 2 of 5 files" in message
    assert "its name says that they are 3, so that it is of another model, or was renamed" in message


@pytest.mark.parametrize(
    ("name", "number", "count", "says"),
    [
        (
            "odd.gguf",
            2,
            3,
            "odd.gguf is part 2 of 3 files that a model is split into; merge them, from the first",
        ),
        ("odd.gguf", 9, 3, "odd.gguf is one of 3 files"),
        ("odd.gguf", 2, "x", "odd.gguf has split.count = 'x', expected a whole number"),
    ],
)
def test_other_names_and_junk(tmp_path: Path, name: str, number: int, count: Any, says: str) -> None:
    assert refusal(write_part(tmp_path / name, number, count)).startswith(says)
