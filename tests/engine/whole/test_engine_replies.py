"""Parts of chat replies leave the engine once and whole, wherever another worker takes over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from penstock.engine import Engine, InvalidRequest, Output, Request, SamplingParams
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.reply import ReplyStreams
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.delta import Delta
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.engines import preempt_all
from tests.engine.text.reply_texts import Message, write
from tests.engine.tokenizers_for_tests import byte_level

# Few enough for a random model to write whole replies with them.
TOKENS = (
    "<think>",
    "</think>",
    '<tool_call>{"name": "search", "arguments": {"q": "',
    '"}}</tool_call>',
)
FIRST_TAG = 267  # behind what the test tokenizer has
X, END = ord("x") - ord("!"), 264
PARAMS = SamplingParams(
    temperature=2.0, max_tokens=16, allowed_token_ids=(*range(FIRST_TAG, FIRST_TAG + len(TOKENS)), X, END)
)
SPEC = ResponseSpec("hermes", tools=(Tool("search"),))


# Calls that lack the tag in front of them or the one behind a parameter.
FLAWED = (
    "<tool_call>",
    "<function=search>\n<parameter=q>\n",
    "\n</parameter>",
    "\n</function>\n</tool_call>",
)


@pytest.fixture
def chatting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The shared engine with a tokenizer whose vocabulary has tags and parts of calls."""
    return with_tokens(engine, TOKENS, monkeypatch)


def with_tokens(engine: Engine, tokens: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Engine:
    tokenizer = byte_level()
    tokenizer.add_tokens(list(tokens))
    assert tokenizer.convert_tokens_to_ids(tokens[0]) == FIRST_TAG
    monkeypatch.setattr(engine._new_choices, "_streams", ReplyStreams(Tokenizer(tokenizer)))
    return engine


def request(seed: int, **changes: object) -> Request:
    return replace(
        Request("r", tuple(range(40, 50)), replace(PARAMS, seed=seed), n=2, response=SPEC),
        **changes,  # type: ignore[arg-type]
    )


def run(engine: Engine, request: Request, preempt_at: int | None = None) -> list[list[Output]]:
    engine.add(request)
    outputs: list[list[Output]] = [[] for _ in range(request.n)]
    for step in itertools.count():
        if not engine.has_work():
            return outputs
        if step == preempt_at:
            preempt_all(engine)
        for output in engine.step():
            outputs[output.index].append(output)
    raise AssertionError("a count has no end")


def message(outputs: Iterable[Output]) -> Message:
    found = Message()
    for output in outputs:
        found.take(Delta(output.text, output.reasoning, output.tool_calls))
    return found


def test_parts_resumed_at_any_token_join_to_the_whole(chatting: Engine) -> None:
    """Two choices are resumed at different tokens: no byte of an argument is lost or doubled."""
    found = resumed_at_any_token(chatting, SPEC)
    assert sum(len(each.calls) for each in found) > 5
    assert sum(bool(each.reasoning) for each in found) > 1


def test_calls_with_flaws_are_the_same_resumed_at_any_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.stats().tool_calls_mended_total
    spec = ResponseSpec("qwen3_coder", tools=(Tool("search"),))
    found = resumed_at_any_token(with_tokens(engine, FLAWED, monkeypatch), spec)
    assert sum(len(each.calls) for each in found) > 5
    assert engine.stats().tool_calls_mended_total > before


def resumed_at_any_token(chatting: Engine, spec: ResponseSpec) -> list[Message]:
    """Returns replies that were the same whole and resumed at each of their tokens."""
    found: list[Message] = []
    for seed in range(8):
        whole = run(chatting, request(seed, response=spec))
        tokens = [tuple(token for output in choice for token in output.token_ids) for choice in whole]
        found += map(message, whole)
        for count in range(1, max(map(len, tokens)) + 1):
            counts = [min(count, len(tokens[0])), min(max(1, count - 3), len(tokens[1]))]
            generated = tuple(taken[:at] for taken, at in zip(tokens, counts, strict=True))
            resumed = run(chatting, request(seed, generated=generated, response=spec))
            for before, after, at in zip(whole, resumed, counts, strict=True):
                done = [output for output in before if output.token_ids and output.offset < at]
                assert message([*done, *after]) == message(before)
                assert after[-1].finish_reason == before[-1].finish_reason
                assert after[-1].stop_reason == before[-1].stop_reason
    return found


def test_a_reply_that_calls_and_stops_says_so(chatting: Engine) -> None:
    reasons = set()
    for seed in range(30):
        for outputs in run(chatting, request(seed)):
            last, found = outputs[-1], message(outputs)
            is_complete = any(arguments.endswith('"}') for _, arguments in found.calls)
            has_stopped = END in last.token_ids
            assert last.finish_reason == (("tool_calls" if is_complete else "stop") if has_stopped else "length")
            assert last.stop_reason == (END if has_stopped else None)
            reasons.add(last.finish_reason)
    assert reasons == {"tool_calls", "stop", "length"}


def test_a_preempted_reply_is_the_same(chatting: Engine) -> None:
    expected = [message(outputs) for outputs in run(chatting, request(3))]
    for step in range(2, 12):
        assert [message(outputs) for outputs in run(chatting, request(3), preempt_at=step)] == expected


def test_an_unknown_format_ends_its_request_alone(chatting: Engine) -> None:
    with pytest.raises(InvalidRequest, match="hermse"):
        chatting.add(request(0, response=ResponseSpec("hermse")))
    assert not chatting.has_work()


NAME = "a" * 30


@pytest.mark.parametrize("reason", ["cancelled", "expired", "length", "stop"])
def test_a_call_that_is_ended_inside_its_name_is_no_text(engine: Engine, reason: str) -> None:
    """That holds in every format, in both of two choices, with tags that are text."""
    (a,) = engine.tokenizer.encode_part("a")
    stop = ("a" * 8,) if reason == "stop" else ()
    for name in FORMATS:
        written = write(name, Message(calls=[(NAME, "")]), call_arguments=[{"q": "x"}])
        begun = tuple(engine.tokenizer.encode_part(written[: written.index(NAME) + 3]))
        params = SamplingParams(max_tokens=len(begun) + 8, allowed_token_ids=(a,), stop=stop)
        spec = ResponseSpec(name, tools=(Tool(NAME),))
        engine.add(Request("r", (40, 41), params, n=2, response=spec, generated=(begun, begun[:-1])))
        outputs: list[list[Output]] = [[], []]
        while engine.has_work():
            if all(outputs) and reason in ("cancelled", "expired"):
                engine.abort("r", reason)  # type: ignore[arg-type]
            for output in engine.step():
                outputs[output.index].append(output)
        assert [message(choice) for choice in outputs] == [Message()] * 2, name
        assert [choice[-1].finish_reason for choice in outputs] == [reason] * 2, name
