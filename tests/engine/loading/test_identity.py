"""A digest tells one checkpoint from another, and ignores what makes no difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.engine.demo import MODEL_DIR
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.identity import Identity, identify
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level, llama2, metaspace, word_level

TEMPLATES = {"default": "{{ messages }}"}
RULES = "rules"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint of our own to change."""
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "copy"))


@pytest.fixture(scope="module")
def original() -> Identity:
    return identified(MODEL_DIR)


def identified(directory: Path) -> Identity:
    return identify(directory, TEMPLATES, Tokenizer.from_dir(directory).rules())


def test_weights_that_are_quantized_while_they_are_loaded_are_others(original: Identity) -> None:
    rules = Tokenizer.from_dir(MODEL_DIR).rules()
    found = {held_as: identify(MODEL_DIR, TEMPLATES, rules, held_as=held_as) for held_as in ("auto", "int8", "int4")}
    assert found["auto"] == original
    whole = identify(MODEL_DIR, TEMPLATES, rules, held_as="int8", activations="int8")
    assert len({identity.weights for identity in (*found.values(), whole)}) == 4


def edit_json(path: Path, change: Callable[[dict[str, Any]], object], indent: int | None = None) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields, indent=indent))


def test_a_copy_is_the_same_whatever_its_formatting(copy: Path, original: Identity) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        edit_json(copy / name, lambda fields: fields.update(dict(reversed(fields.items()))), indent=3)
    edit_json(copy / "tokenizer_config.json", lambda fields: fields.update(chat_template="other", model_max_length=7))
    edit_json(copy / "config.json", lambda fields: fields.update(transformers_version="4.0.0"))
    (copy / "README.md").write_text("anything")
    assert identified(copy) == original
    assert original.revision is None
    assert {len(original.weights), len(original.tokenizer), len(original.template or "")} == {32}


def test_other_weights(copy: Path, original: Identity) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    save_file({name: value + 1 for name, value in weights.items()}, path)
    other = identified(copy)
    assert other.weights != original.weights
    assert other.tokenizer == original.tokenizer


def one_more_token(fields: dict[str, Any]) -> None:
    fields["added_tokens"].append(fields["added_tokens"][0] | {"content": "<|new|>", "id": 639, "special": False})


def not_special(fields: dict[str, Any]) -> None:
    fields["added_tokens"][-1]["special"] = False


def swap_merges(fields: dict[str, Any]) -> None:
    fields["model"]["merges"] = [*fields["model"]["merges"][1:], fields["model"]["merges"][0]]


OTHERS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "one more added token": ("tokenizer.json", one_more_token),
    "a token that is not special": ("tokenizer.json", not_special),
    "merges in another order": ("tokenizer.json", swap_merges),
    "a normalizer": ("tokenizer.json", lambda fields: fields.update(normalizer={"type": "Lowercase"})),
    "another end": ("tokenizer_config.json", lambda fields: fields.update(eos_token="<|pad|>")),
    "one more special token": ("tokenizer_config.json", lambda fields: fields.update(bos_token="<|new|>")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_tokenizer(copy: Path, original: Identity, name: str) -> None:
    file, change = OTHERS[name]
    edit_json(copy / file, change)
    other = identified(copy)
    assert other.tokenizer != original.tokenizer
    assert other.weights == original.weights


@pytest.mark.parametrize("make", [None, byte_level, llama2, metaspace, word_level])
def test_a_tokenizer_that_was_saved_anew_is_the_same(
    tmp_path: Path, make: Callable[[], PreTrainedTokenizerFast] | None
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    if make is None:
        shutil.copytree(MODEL_DIR, first)  # as another version of transformers wrote it
    else:
        make().save_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    if tokenizer.pad_token:
        tokenizer("text", padding="max_length", truncation=True, max_length=4)  # it is saved too
    tokenizer.save_pretrained(second)
    assert (first / "tokenizer_config.json").read_text() != (second / "tokenizer_config.json").read_text()
    assert Tokenizer.from_dir(second).rules() == Tokenizer.from_dir(first).rules()


def test_templates(original: Identity) -> None:
    found = {
        identify(MODEL_DIR, templates, RULES).template
        for templates in ({}, TEMPLATES, {"default": "x"}, {**TEMPLATES, "tool_use": "x"})
    }
    assert len(found) == 4
    assert None in found
    assert original.template in found


def test_rules_of_rendering_are_of_the_digest_but_not_of_the_template() -> None:
    """Workers of other rules join a queue. They leave half-written replies to each other, unless no rule applies."""
    rules = (None, "1 systems", "2 systems", "1 system")
    found = [identify(MODEL_DIR, TEMPLATES, RULES, limits=["parts"], template_rules=each) for each in rules]
    assert len({identity.digest(None) for identity in found}) == len(rules)
    assert len({identity.template for identity in found}) == 1
    assert found[0].digest(None) == identify(MODEL_DIR, TEMPLATES, RULES).digest(None)


def test_each_rule_and_each_default_is_of_the_digest() -> None:
    """A worker of other rules, or of other values for what a request leaves open, continues no reply of this one."""
    plain = identify(MODEL_DIR, TEMPLATES, RULES)
    others = [replace(plain, **{name: "other"}).digest(None) for name in (field.name for field in fields(Identity))]
    decisive = {
        field.name for field, other in zip(fields(Identity), others, strict=True) if other != plain.digest(None)
    }
    assert decisive == {field.name for field in fields(Identity)} - {"revision", "template_limits", "generation_source"}
    assert len(set(others)) == len(decisive) + 1


def test_the_templates_of_a_tokenizer_are_those_that_render() -> None:
    assert Tokenizer.from_dir(MODEL_DIR).templates == {"default": (MODEL_DIR / "chat_template.jinja").read_text()}


def test_a_snapshot_of_the_hub_has_its_revision(copy: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    (tmp_path / "snapshots").mkdir()
    copy.rename(tmp_path / "snapshots" / commit)
    assert identify(tmp_path / "snapshots" / commit, {}, RULES).revision == commit


def test_a_file_that_is_none_is_refused(copy: Path) -> None:
    (copy / "more.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"more\.safetensors is a directory"):
        identify(copy, {}, RULES)
