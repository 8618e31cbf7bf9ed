"""`doctor` and a worker refuse a checkpoint whose tokenizer is missing, empty or another model's."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.checks.model import check_model
from penstock.cli.shared.serve import load_model
from penstock.engine import Engine
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.folder import Folder
from penstock.engine.models import FAMILIES
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.engines import SMALL, VOCAB_SIZE, write_model
from tests.engine.loading.gguf_files import all_of, write_gguf
from tests.support.patience import WAIT_S

NO_TOKENIZER = "holds no tokenizer: there is no tokenizer.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family for which transformers makes up an empty tokenizer."""
    return write_model(tmp_path_factory.mktemp("sound") / "model", "qwen3")


def refusal(path: Path) -> str:
    """Returns the one refusal that both checking and loading give."""
    found = {finding.name: finding for finding in check_model(str(path), "auto")}["tokenizer"]
    assert found.status == "fail"
    assert found.fix.startswith("copy tokenizer.json")
    with pytest.raises(CheckpointError) as refused:
        load_model(str(path), SMALL)
    assert str(refused.value) == found.detail
    return found.detail


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [True, False], ids=["settings", "nothing"])
def test_no_family_has_a_tokenizer_without_files(tmp_path: Path, family: str, settings: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "special_tokens_map.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text("x")
    with pytest.raises(CheckpointError, match=NO_TOKENIZER):
        Folder(tmp_path).tokenizer()


def emptied(state: dict[str, Any]) -> None:
    state["model"]["vocab"], state["model"]["merges"], state["added_tokens"] = {}, [], []


def only_special(state: dict[str, Any]) -> None:
    state["model"]["vocab"], state["model"]["merges"] = {}, []
    state["added_tokens"] = [{**token, "special": True} for token in state["added_tokens"]]


def larger(state: dict[str, Any]) -> None:
    state["model"]["vocab"]["zzz"] = VOCAB_SIZE


def beyond(state: dict[str, Any]) -> None:
    first = 1 + state["added_tokens"][-1]["id"]
    more = [{"id": id_, "content": f"<image {id_}>"} for id_ in range(first, VOCAB_SIZE + 1)]
    state["added_tokens"] += [{**state["added_tokens"][-1], **fields} for fields in more]


def edited(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit_file(path: Path) -> None:
        state = json.loads(path.read_text())
        edit(state)
        path.write_text(json.dumps(state))

    return edit_file


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (Path.unlink, NO_TOKENIZER),
    "no bytes": (lambda path: path.write_text(""), "no tokenizer could be loaded from"),
    "half a file": (lambda path: path.write_bytes(path.read_bytes()[:500]), "no tokenizer could be loaded from"),
    "an empty object": (lambda path: path.write_text("{}"), "no tokenizer could be loaded from"),
    "null": (lambda path: path.write_text("null"), "no tokenizer could be loaded from"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256))), "no tokenizer could be loaded from"),
    "no tokens": (edited(emptied), "the tokenizer's vocabulary is empty: of 1 tokens none has text"),
    "special tokens alone": (edited(only_special), "the tokenizer's vocabulary is empty"),
    "another model's": (edited(larger), "ids up to 272, and the model has 272 tokens"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_no_tokenizer_of_this_model_is_refused(tmp_path: Path, sound: Path, harm: str) -> None:
    spoil, message = HARMS[harm]
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    spoil(model / "tokenizer.json")
    assert message in refusal(model)


def test_added_tokens_may_be_beyond_the_model_s(tmp_path: Path, sound: Path) -> None:
    """Gemma 3 has such tokens for images, in checkpoints that know text alone."""
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    edited(beyond)(model / "tokenizer.json")
    (found,) = (finding for finding in check_model(str(model), "auto") if finding.name == "tokenizer")
    assert (found.status, found.detail.split(",")[0]) == ("ok", "273 tokens")


def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path: Path, sound: Path) -> None:
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    (model / "tokenizer.json").unlink()
    assert "holds no tokenizer: it has no tokenizer.ggml.model" in refusal(
        write_gguf(tmp_path / "model.gguf", model, all_of("F32"))
    )


def test_of_a_tokenizer_and_weights_that_are_both_bad_the_tokenizer_is_named(tmp_path: Path, sound: Path) -> None:
    """They are read at the same time, and whichever is found out first."""
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"PK\x03\x04 not weights")
    with pytest.raises(CheckpointError, match="no tokenizer could be loaded from"):
        load_model(str(model), SMALL)


def test_no_further_weights_are_read_once_the_tokenizer_turned_out_bad(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refuse(*_: object, **__: object) -> Tokenizer:
        refused.set()
        raise CheckpointError("no tokenizer")

    monkeypatch.setattr(Tokenizer, "from_dir", refuse)
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int, what: str) -> None:
        assert refused.wait(WAIT_S)
        seen.append((done, total))

    with pytest.raises(CheckpointError, match="no tokenizer"):
        Engine.from_checkpoint(sound, SMALL, report)
    assert all(done < total for done, total in seen)
