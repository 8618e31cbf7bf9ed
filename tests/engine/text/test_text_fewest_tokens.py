"""The lower bound on the number of tokens holds for every text; where none holds, there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from penstock.engine.demo import MODEL_DIR
from penstock.engine.text import tokenizer as tokenizer_module
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama2, metaspace, word_level

PARTS = st.sampled_from(
    ["the", " ", "  ", "é", "e\u0301", "▁", "a", "<|end|>", "<tool>", "é à", "<s>", "\n", "🛁", "<0x41>", "ĠtheĠ"]
)
TEXTS = st.lists(PARTS | st.text(max_size=5), max_size=40).map("".join)


def composing() -> Any:
    made = byte_level()
    made.backend_tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    return made


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: Tokenizer(byte_level()),
    "composing": lambda: Tokenizer(composing()),
    "llama2": lambda: Tokenizer(llama2()),
    "demo": lambda: Tokenizer.from_dir(MODEL_DIR),
}


@pytest.fixture(scope="module", params=BOUNDED)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BOUNDED[request.param]()


@given(text=TEXTS)
def test_the_bound_is_never_above_the_number_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert 0 <= fewest(tokenizer, text) <= len(tokenizer.encode(text))


def test_the_bound_of_ordinary_text_is_worth_something(tokenizer: Tokenizer) -> None:
    text = "the a b " * 1000
    assert len(tokenizer.encode(text)) / 60 < fewest(tokenizer, text)


def test_text_that_is_not_composed_has_no_bound() -> None:
    tokenizer = Tokenizer(composing())
    assert fewest(tokenizer, "e\u0301" * 1000) == 0
    assert fewest(tokenizer, "é" * 1000) > 0


def with_space_taking_token() -> Any:
    made = byte_level()
    made.backend_tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def with_dropping_split() -> Any:
    made = byte_level()
    dropping = pre_tokenizers.Split(" ", behavior="removed")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([dropping, pre_tokenizers.ByteLevel()])
    return made


def with_normalizer(normalizer: Any) -> Callable[[], Any]:
    def made() -> Any:
        tokenizer = byte_level()
        tokenizer.backend_tokenizer.normalizer = normalizer
        return tokenizer

    return made


UNBOUNDED = {
    "takes space": with_space_taking_token,
    "drops": with_dropping_split,
    "strips": with_normalizer(normalizers.Strip()),
    "compatibility": with_normalizer(normalizers.NFKC()),
    "unknown words": word_level,
    "unknown letters": metaspace,
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_text_has_no_bound(kind: str) -> None:
    told: list[int] = []
    Tokenizer(UNBOUNDED[kind]()).encode("the " * 1000, told.append)
    assert told == []


def test_what_is_refused_by_the_bound_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def refuse(least: int) -> None:
        raise Refused(least)

    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(tokenizer_module, "token_ids", encode)
    tokenizer = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    with pytest.raises(Refused):
        tokenizer.encode("the " * 1000, refuse)
    with pytest.raises(Refused):
        tokenizer.encode_chat(Conversation([{"role": "user", "content": "the " * 1000}]), refuse)


def fewest(tokenizer: Tokenizer, text: str) -> int:
    told: list[int] = []
    tokenizer.encode(text, told.append)
    return told[0]
