"""Calls are answered as a request would be treated, and nothing is generated."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.structured import Grammar
from penstock.protocol.wire import entry_size
from penstock.tools.chaos.fake_engine import FakeEngine, FakeText
from penstock.worker.calls.answering import Answerer, Answers
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.preparation import Preparer
from penstock.worker.run.entries import QueueEntry

CHAT = [{"role": "user", "content": "hi"}]


class BrokenText(FakeText):
    def decode(self, token_ids: object) -> str:
        raise RuntimeError("broken")


class Refusing:
    """A compiler that accepts no grammar."""

    def __init__(self) -> None:
        self.num_asked = 0

    def compile(self, source: str) -> Grammar:
        self.num_asked += 1
        raise InvalidRequest(f"the grammar can't be used: {source[:5]}")


def make(text: FakeText | None = None, grammars: Refusing | None = None, **config: int) -> Answerer:
    limits, text = WorkerConfig(**config), text or FakeText()  # type: ignore[arg-type]
    engine = FakeEngine(max_model_len=10)
    defaults = GenerationDefaults(eos_token_ids=())
    return Answerer(
        limits.max_body_bytes, Answers(limits, Preparer(text, limits, grammars), 256, defaults, engine.check)
    )


@pytest.fixture
def answerer() -> Iterator[Answerer]:
    made = make(max_prompt_tokens=8, max_body_bytes=2000)
    yield made
    made.close()


def entry(call: str, **fields: object) -> QueueEntry:
    flat = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    encoded = {name.encode(): value.encode() for name, value in {"call": call, **flat}.items()}
    return QueueEntry("1700000000000-0", encoded, entry_size(encoded))


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (entry("count_tokens", prompt="hello"), {"prompt_tokens": "5"}),
        (entry("count_tokens", prompt="h" * 1000), {"prompt_tokens": "1000"}),  # too long for the engine
        (entry("count_tokens", messages=CHAT), {"prompt_tokens": "7"}),
        (entry("count_tokens", prompt_token_ids=[1, 2]), {"prompt_tokens": "2"}),
        (entry("count_tokens", request={"prompt": "hello", "id": "r"}, id="c"), {"prompt_tokens": "5"}),
        (entry("tokenize", prompt="abc", to="m", timeout_ms=5), {"prompt_tokens": "3", "tokens": "97,98,99"}),
        (entry("tokenize", prompt=""), {"prompt_tokens": "0", "tokens": ""}),
        (entry("detokenize", prompt_token_ids=[104, 105]), {"text": "hi"}),
        (entry("validate", prompt="hello", temperature=0, n=2), {"prompt_tokens": "5"}),
    ],
)
async def test_what_is_asked_is_answered(answerer: Answerer, asked: QueueEntry, answer: dict[str, str]) -> None:
    assert await answerer.answer(asked) == answer


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (entry("counts", prompt="x"), "invalid_request", "call: must be one of count_tokens, .*, not 'counts'"),
        (entry("tokenize"), "invalid_request", "no fields"),
        (entry("tokenize", prompt="x", promt="y"), "invalid_request", "promt"),
        (entry("tokenize", messages=[{"role": "system", "content": "x"}]), "invalid_request", "must be the user's"),
        (entry("detokenize", prompt="x"), "invalid_request", "detokenize: needs prompt_token_ids"),
        (entry("detokenize", prompt_token_ids=[1, 300]), "invalid_request", "holds 300, the vocabulary ends at 255"),
        (entry("validate", prompt="x", n=9), "invalid_request", "n is 9, the limit max_n is 8"),
        (entry("validate", prompt="x", temperature=-1), "invalid_request", "temperature"),
        (entry("validate", prompt=""), "invalid_request", "the prompt is empty"),
        (entry("validate", prompt="x" * 9), "too_long", "9 tokens, the limit max_prompt_tokens is 8"),
        (entry("tokenize", prompt="x" * 2000), "too_large", "the limit max_body_bytes is 2000"),
    ],
)
async def test_what_can_t_be_answered_says_why(answerer: Answerer, asked: QueueEntry, code: str, message: str) -> None:
    answer = await answerer.answer(asked)
    assert answer["code"] == code
    assert answer.keys() == {"code", "message"}
    assert re.search(message, answer["message"])


async def test_what_the_engine_refuses_is_refused() -> None:
    answerer = make()
    answer = await answerer.answer(entry("validate", prompt="x" * 11))
    assert answer == {"code": "too_long", "message": "the prompt has 11 tokens, at most 10"}
    answerer.close()


class Special(FakeText):
    def spell_all(self, token_ids: Sequence[int]) -> str:
        return f"<s>{self.decode(token_ids)}"


async def test_special_tokens_are_spelled_out_if_asked_for() -> None:
    answerer = make(Special())
    asked = entry("detokenize", prompt_token_ids=[104, 105], skip_special_tokens=False)
    assert await answerer.answer(asked) == {"text": "<s>hi"}
    assert await answerer.answer(entry("detokenize", prompt_token_ids=[104, 105])) == {"text": "hi"}
    answerer.close()


class Wordy(FakeText):
    def decode(self, token_ids: Sequence[int]) -> str:
        return "é" * 100 * len(token_ids)


async def test_an_answer_is_not_many_times_larger_than_any_call() -> None:
    answerer = make(Wordy(), max_body_bytes=500)
    assert await answerer.answer(entry("detokenize", prompt_token_ids=[1] * 10)) == {"text": "é" * 1000}
    answer = await answerer.answer(entry("detokenize", prompt_token_ids=[1] * 11))
    message = "the answer has 2200 bytes, the limit is 2000, 4 times max_body_bytes"
    assert answer == {"code": "too_large", "message": message}
    answer = await answerer.answer(entry("tokenize", prompt="z" * 460))
    assert (answer["prompt_tokens"], len(answer["tokens"])) == ("460", 4 * 460 - 1)
    answerer.close()


async def test_a_grammar_is_compiled_where_a_request_is_validated_and_nowhere_else() -> None:
    grammars = Refusing()
    answerer = make(grammars=grammars)
    assert await answerer.answer(entry("count_tokens", prompt="x", regex="a+")) == {"prompt_tokens": "1"}
    assert grammars.num_asked == 0
    answer = await answerer.answer(entry("validate", prompt="x", regex="a+"))
    assert (answer["code"], grammars.num_asked) == ("invalid_request", 1)
    assert answer["message"].startswith("the grammar can't be used")
    answerer.close()


async def test_a_text_encoder_that_breaks_fails_its_call_alone() -> None:
    answerer = make(BrokenText())
    answer = await answerer.answer(entry("detokenize", prompt_token_ids=[1]))
    assert answer == {"code": "internal_error", "message": "the worker failed to answer; its log says why"}
    assert await answerer.answer(entry("count_tokens", prompt="x")) == {"prompt_tokens": "1"}
    answerer.close()


async def test_a_grammar_is_compiled_off_the_event_loop_and_refused_by_its_own_words() -> None:
    class Compiler:
        def compile(self, source: str) -> Grammar:
            raise InvalidRequest(f"no grammar in {threading.current_thread().name}")

    limits, defaults = WorkerConfig(), GenerationDefaults(eos_token_ids=())
    preparer = Preparer(FakeText(), limits, Compiler())
    made = Answerer(limits.max_body_bytes, Answers(limits, preparer, 256, defaults, FakeEngine().check))
    try:
        answer = await made.answer(entry("validate", prompt="x", regex="a+"))
        assert answer["code"] == "invalid_request"
        assert answer["message"].startswith("no grammar in penstock-grammar")
        assert await made.answer(entry("count_tokens", prompt="x", regex="a+")) == {"prompt_tokens": "1"}
    finally:
        made.close()
