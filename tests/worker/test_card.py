"""A worker's card: what it says, and what readers make of it."""

from __future__ import annotations

import dataclasses

import pytest

from penstock import __version__
from penstock.engine.loading.identity import Identity
from penstock.protocol.wire import ModelCard, decode_card
from penstock.worker.card import make_card
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import BadWorkerConfig
from tests.worker.test_startup_report import INFO

IDENTITY = Identity(revision="c0ffee", weights="1" * 32, tokenizer="2" * 32, template="3" * 32)
CONFIG = WorkerConfig(name="w", max_n=3, max_prompt_tokens=100)


def encoded(card: ModelCard) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in card.to_fields().items()}


def test_it_says_what_the_worker_knows() -> None:
    card = make_card("demo", CONFIG, INFO, IDENTITY, "hermes")
    assert card.model_dump() == {
        "model": "demo", "aliases": None, "worker": "w", "version": __version__, **dataclasses.asdict(IDENTITY),
        "chat_format": "hermes", "digest": IDENTITY.digest("hermes"),
        "vocab_size": 512, "max_model_len": 1024, "dtype": "float32",
        "attention": INFO.attention, "matmul": INFO.matmul, "arithmetic": None, "batch_invariant": True,
        "max_body_bytes": 1 << 20, "max_prompt_tokens": 100, "max_n": 3, "max_stop_strings": 16, "max_stop_chars": 256,
        "max_keep_s": 604_800.0,
    }  # fmt: skip
    assert decode_card(encoded(card)) == card
    assert len({IDENTITY.digest(chat_format) for chat_format in ("hermes", "mistral", None)}) == 3


def test_its_names_are_those_that_are_set_or_else_the_models_own() -> None:
    card = make_card("/models/a b", WorkerConfig(served_model_name=("small", "gpt-4o", "x/y")), None, None, None)
    assert (card.model, card.aliases, card.names) == ("small", "gpt-4o x/y", ("small", "gpt-4o", "x/y"))
    assert decode_card(encoded(card)) == card
    assert make_card("/models/a b", CONFIG, None, None, None).names == ("/models/a b",)


@pytest.mark.parametrize("name", ["", "two words", "a,b", "x" * 257])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadWorkerConfig, match="served_model_name"):
        WorkerConfig(served_model_name=("a", name))


def test_the_arithmetic_of_another_engine_or_version_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [dataclasses.replace(INFO, arithmetic=name * 16) for name in "ab"]
    named = [make_card("demo", CONFIG, info, IDENTITY, None).arithmetic for info in (*engines, INFO)]
    assert named[2] is None
    monkeypatch.setattr("penstock.worker.card.__version__", "99.0")
    later = make_card("demo", CONFIG, engines[0], IDENTITY, None).arithmetic
    assert [len(name or "") for name in {*named[:2], later}] == [16] * 3


def test_what_is_not_known_is_left_out() -> None:
    card = make_card("", CONFIG, None, None, None)
    assert "tokenizer" not in card.to_fields()
    assert decode_card(encoded(card)) == card


def test_a_reader_ignores_what_a_later_version_says() -> None:
    card = make_card("demo", CONFIG, INFO, IDENTITY, None)
    assert decode_card({**encoded(card), b"news": b"x"}) == card


@pytest.mark.parametrize("fields", [{b"model": b"x"}, {b"model": b"\xff"}, {b"vocab_size": b"many"}])
def test_what_is_no_card_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="the model card's key holds no valid card"):
        decode_card(fields)
