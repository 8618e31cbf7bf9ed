"""Slow calls of a tokenizer release the GIL: a thread that needs a voluntary release gets to run."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.text import unlocked
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama2, metaspace, word_level

NEVER_S = 3600.0  # until a thread that waits for the lock has it taken from the one that runs
TIMES = 3000  # that a call is made while nobody else gets in, until that counts as never
TEXT = "the é a 🛁 <|end|> " * 60
TEXTS = ["", "the", " the é 🛁\n", "<|end|> spelled out", "<tool>é à", "</s>a</s> b", "b c", "\x00\u200d", TEXT]
KINDS = [byte_level, llama2, metaspace, word_level]
CALLS: dict[str, Callable[[Tokenizer, list[int]], object]] = {
    "encode": lambda tokenizer, _: tokenizer.encode(TEXT),
    "encode_part": lambda tokenizer, _: tokenizer.encode_part(TEXT),
    "decode": lambda tokenizer, ids: tokenizer.decode(ids),
}


@pytest.fixture
def taken_by_none() -> Iterator[None]:
    """Makes no thread give up the GIL while this lasts."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_lets_go_of_the_lock(name: str, taken_by_none: None) -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [*tokenizer.encode(TEXT)]
    assert lets_others_in(lambda: CALLS[name](tokenizer, ids))


def test_a_call_of_the_library_that_keeps_it_is_seen(taken_by_none: None) -> None:
    backend = byte_level().backend_tokenizer
    assert not lets_others_in(lambda: backend.encode("the"), times=100)


@pytest.mark.parametrize("made", KINDS)
@pytest.mark.parametrize("special", [False, True])
def test_they_say_what_the_calls_that_keep_it_say(made: Callable[[], Any], special: bool) -> None:
    backend = made().backend_tokenizer
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=special).ids
        assert unlocked.token_ids(backend, text, add_special_tokens=special) == ids
        expected = backend.decode(ids, skip_special_tokens=special)
        assert unlocked.text_of(backend, ids, skip_special_tokens=special) == expected


def test_nothing_else_calls_the_library_to_encode_or_decode() -> None:
    """The source is searched for the names that tokenizers of the library have here, and for the calls that
    they have.
    """
    root = Path(unlocked.__file__).parents[1]
    calls = {"encode", "encode_batch", "encode_batch_fast", "decode", "decode_batch"}
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in calls and "backend" in ast.unparse(node.value)
    }
    assert found == {"text/unlocked.py"}


def test_a_chat_is_encoded_by_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = unlocked.token_ids

    def noted(backend: Any, text: str, **options: Any) -> list[int]:
        asked.append(text)
        return real(backend, text, **options)

    monkeypatch.setattr("penstock.engine.text.tokenizer.token_ids", noted)
    tokenizer = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    chat = tokenizer.encode_chat(Conversation([{"role": "user", "content": "the"}]))
    assert asked == [chat.text]


def lets_others_in(call: Callable[[], object], times: int = TIMES) -> bool:
    """Checks whether a thread that waits for the GIL gets it while `call` runs, again and again."""
    starts, is_in = threading.Event(), False

    def wait() -> None:
        nonlocal is_in
        starts.wait()
        is_in = True

    other = threading.Thread(target=wait)
    other.start()
    starts.set()
    for _ in range(times):
        call()
        if is_in:
            break
    was_in = is_in  # before `join` lets it in
    other.join()
    return was_in
