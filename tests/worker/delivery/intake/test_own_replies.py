"""What we answered is taken back, wherever it was cut off: in every format, by every template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.delta import ReplyEnd
from penstock.producer import Choice, ToolCall
from penstock.protocol.wire import GenerateRequest
from penstock.worker.intake.preparation import conversation
from tests.engine.text.reply_texts import Message, as_written, parser, write
from tests.engine.text.test_text_history import ALL, template

ARGUMENTS: list[dict[str, object]] = [{"city": 'Zürich "HB"', "days": 2}, {}]
TOOL = {"type": "function", "function": {"name": "search", "description": "It.", "parameters": {"properties": {}}}}
NEXT = {"role": "user", "content": "Go on."}
TOKEN_CHARS = 4


@cache
def replies(format_name: str) -> list[dict[str, Any]]:
    """Returns the different messages that one reply is when it is cut after each of its tokens, and when it is not."""
    calls = [("get_weather", json.dumps(ARGUMENTS[0])), ("search", "{}")][: 1 if format_name == "gpt_oss" else 2]
    said = Message("" if format_name.startswith("llama") else "Let me look.", "Hm, hm.", calls)
    text = as_written(format_name, write(format_name, said, call_arguments=ARGUMENTS[: len(calls)]), special=True)
    found: list[dict[str, Any]] = []
    for end in (*range(0, len(text), TOKEN_CHARS), len(text)):
        message = _read(format_name, text[:end], ReplyEnd.ITSELF if end == len(text) else ReplyEnd.CUT)
        found += [message] if message not in found else []
    return found


@cache
def different_replies() -> list[dict[str, Any]]:
    """Returns the messages of all formats. A template is given a message alone, and most formats cut to the same."""
    messages = [message for format_name in FORMATS for message in replies(format_name)]
    return list({json.dumps(message): message for message in messages}.values())


def _read(format_name: str, text: str, ended: ReplyEnd) -> dict[str, Any]:
    reading, found = parser(format_name, special=True), Message()
    for place in range(0, len(text), TOKEN_CHARS):
        found.take(reading.push(text[place : place + TOKEN_CHARS]))
    found.take(reading.finish(ended=ended))
    calls = tuple(ToolCall(f"call_{place}", name, written) for place, (name, written) in enumerate(found.calls))
    return Choice(0, found.text, (), None, "length", found.reasoning, calls).message


def histories(message: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yields what clients make of an answer: they go on, they answer its calls, or they send it as it is."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "Not run."} for call in message.get("tool_calls", ())
    ]
    yield [NEXT, message]
    yield [NEXT, message, NEXT]
    if results:
        yield [NEXT, message, *results]
        yield [NEXT, message, *results[1:], NEXT]


@pytest.mark.parametrize("format_name", FORMATS)
def test_some_calls_of_a_reply_are_cut_off(format_name: str) -> None:
    calls = [call for message in replies(format_name) for call in message.get("tool_calls", ())]
    assert {_is_object(call) for call in calls} == {True, False}


@pytest.mark.parametrize("template_name", ALL)
def test_a_reply_of_any_format_is_taken_back_wherever_it_was_cut(template_name: str) -> None:
    for message in different_replies():
        for history in histories(message):
            asked = GenerateRequest.model_validate({"messages": history, "tools": [TOOL]})
            sent = GenerateRequest.model_validate_json(asked.to_entry()["request"])
            chat = template(template_name).render(conversation(sent, 0.0))
            calls = message.get("tool_calls", ())
            assert all(call["function"]["name"] in chat.text for call in calls)
            assert calls or message["content"].strip() in chat.text  # some templates show no text beside calls
            assert history[-1]["content"].strip() in chat.text or history[-1] is message


def _is_object(call: dict[str, Any]) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
