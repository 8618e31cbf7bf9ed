"""Files of a checkpoint that make no sense are refused at once, by name."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.demo import MODEL_DIR
from penstock.engine.errors import CheckpointError, shown
from penstock.engine.generation_defaults import read_generation_defaults
from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.engine.loading.files import MAX_BYTES, check_files, read_json
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.text.tokenizer import Tokenizer

READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_model_config,
    "generation_config.json": lambda path: read_generation_defaults(open_checkpoint(path)),
    "model.safetensors": lambda directory: check_weights(directory, read_model_config(directory)),
    "tokenizer.json": Tokenizer.from_dir,
    "tokenizer_config.json": Tokenizer.from_dir,
    "special_tokens_map.json": Tokenizer.from_dir,
    "chat_template.jinja": Tokenizer.from_dir,
    "additional_chat_templates/tools.jinja": Tokenizer.from_dir,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy)
    (copy / "additional_chat_templates").mkdir()
    return copy


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_blocks_nobody(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=rf"{name} is a FIFO, not a regular file"):
        READERS[name](directory)


@pytest.mark.parametrize("name", READERS)
def test_a_device_is_not_read(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} is a device, not a regular file"):
        READERS[name](directory)


@pytest.mark.parametrize("name", [name for name in READERS if name != "model.safetensors"])
def test_a_file_of_any_size_is_not_read(directory: Path, name: str) -> None:
    with (directory / name).open("wb") as file:
        file.truncate(2**40)  # with no block on the disk
    with pytest.raises(CheckpointError, match=rf"{name} has 1099511627776 bytes, more than the {MAX_BYTES}"):
        READERS[name](directory)


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
@pytest.mark.parametrize("content", ["[" * 10**6, '{"a":' * 10**6 + "1" + "}" * 10**6, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_breaks_the_parser(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(CheckpointError, match=str(directory)):
        READERS[name](directory)


def test_a_socket_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("merges.txt")
        with pytest.raises(CheckpointError, match=r"merges\.txt is a socket"):
            check_files(directory)


def test_links_to_files_are_followed_and_links_to_nowhere_are_not_there(directory: Path) -> None:
    (directory / "config.json").rename(directory / "blob")
    (directory / "config.json").symlink_to("blob")
    (directory / "added_tokens.json").symlink_to("nowhere")
    check_files(directory)
    assert read_json(directory / "config.json")["model_type"] == "qwen3"
    with pytest.raises(CheckpointError, match=r"there is no added_tokens\.json"):
        read_json(directory / "added_tokens.json")


def test_values_in_messages_are_short() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for value in (deep, "x" * 10**6, [1] * 10**6, {str(i): i for i in range(10**4)}, 10**4000):
        assert len(shown(value)) < 500
    assert shown("LlamaForCausalLM") == "'LlamaForCausalLM'"
