"""What tells one checkpoint from another, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine.demo import MODEL_DIR
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.identity import Identity, identify
from penstock.engine.text.tokenizer import Tokenizer

TEMPLATES = {"default": "{{ messages }}"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint of our own to change."""
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "copy"))


@pytest.fixture(scope="module")
def original() -> Identity:
    return identify(MODEL_DIR, TEMPLATES)


def edit_json(path: Path, change: Callable[[dict[str, object]], object], indent: int | None = None) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields, indent=indent))


def test_a_copy_is_the_same_whatever_its_formatting(copy: Path, original: Identity) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        edit_json(copy / name, lambda fields: fields.update(dict(reversed(fields.items()))), indent=3)
    edit_json(copy / "tokenizer_config.json", lambda fields: fields.update(chat_template="other"))
    (copy / "README.md").write_text("anything")
    assert identify(copy, TEMPLATES) == original
    assert original.revision is None
    assert {len(original.weights), len(original.tokenizer), len(original.template or "")} == {32}


def test_other_weights(copy: Path, original: Identity) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    save_file({name: value + 1 for name, value in weights.items()}, path)
    other = identify(copy, TEMPLATES)
    assert other.weights != original.weights
    assert other.tokenizer == original.tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_another_tokenizer(copy: Path, original: Identity, name: str) -> None:
    edit_json(copy / name, lambda fields: fields.update(added="x"))
    other = identify(copy, TEMPLATES)
    assert other.tokenizer != original.tokenizer
    assert other.weights == original.weights


def test_a_tokenizer_of_other_files(copy: Path, original: Identity) -> None:
    (copy / "tokenizer.json").rename(copy / "tokenizer.model")
    first = identify(copy, TEMPLATES).tokenizer
    (copy / "vocab.json").write_text('{"a": 1}')
    assert len({first, identify(copy, TEMPLATES).tokenizer, original.tokenizer}) == 3


def test_templates(original: Identity) -> None:
    found = {
        identify(MODEL_DIR, templates).template
        for templates in ({}, TEMPLATES, {"default": "x"}, {**TEMPLATES, "tool_use": "x"})
    }
    assert len(found) == 4
    assert None in found
    assert original.template in found


def test_the_templates_of_a_tokenizer_are_those_that_render() -> None:
    assert Tokenizer.from_dir(MODEL_DIR).templates == {"default": (MODEL_DIR / "chat_template.jinja").read_text()}


def test_a_snapshot_of_the_hub_has_its_revision(copy: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    (tmp_path / "snapshots").mkdir()
    copy.rename(tmp_path / "snapshots" / commit)
    assert identify(tmp_path / "snapshots" / commit, {}).revision == commit


def test_a_file_that_is_none_is_refused(copy: Path) -> None:
    (copy / "more.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"more\.safetensors is a directory"):
        identify(copy, {})
