"""Calls that are nearly right are calls if the function is known and nothing else can be meant; else they are text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.flaws import Flaw
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.delta import ReplyEnd
from tests.engine.text.reply_texts import Message, as_written, formats, is_json, read, write

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = (Tool("get_weather", json.dumps(CITY)), Tool("now", '{"type": "object", "properties": {}}'))
OSLO, NOW = ("get_weather", '{"city": "Oslo"}'), ("now", "{}")

NEARLY_RIGHT: dict[Flaw, tuple[tuple[str, str, Message], ...]] = {
    Flaw.NO_OPENING: (
        (
            "qwen3_coder",
            "I look.\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
            Message("I look.", calls=[OSLO]),
        ),
    ),
    Flaw.STRAY_TAG: (
        (
            "hermes",
            '<tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n</tool_call>\nSo.',
            Message("So.", calls=[NOW]),
        ),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]now[ARGS]{}", Message(calls=[NOW])),
        ("lfm2", "<|tool_call_start|>[now())]<|tool_call_end|>So.", Message("So.", calls=[NOW])),
    ),
    Flaw.NO_PARAMETER_END: (
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
            Message(calls=[OSLO]),
        ),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n"
                "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
            ),
            Message(calls=[("get_weather", '{"city": "Oslo", "days": 3}'), NOW]),
        ),
    ),
    Flaw.TEXT_ARGUMENTS: (
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}\n</tool_call>',
            Message(calls=[OSLO]),
        ),
    ),
    Flaw.NULL_ARGUMENTS: (
        ("hermes", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', Message(calls=[NOW])),
    ),
    Flaw.LIST: (
        (
            "hermes",
            (
                '<tool_call>\n[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
                '{"name": "now", "arguments": {}}]\n</tool_call>'
            ),
            Message(calls=[OSLO, NOW]),
        ),
    ),
    Flaw.LONE_BACKSLASH: (
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "C:\\dir"}}\n</tool_call>',
            Message(calls=[("get_weather", '{"city": "C:\\\\dir"}')]),
        ),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "\\u12"}', Message(calls=[("now", '{"a": "\\\\u12"}')])),
    ),
    Flaw.OTHER_SEPARATOR: (
        (
            "llama3_json",
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}',
            Message(calls=[OSLO, NOW]),
        ),
        (
            "llama3_json",
            '{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}',
            Message(calls=[NOW, NOW]),
        ),
    ),
    Flaw.NO_BODY: (
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|><|call|>", Message(calls=[NOW])),
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>", Message(calls=[NOW])),
    ),
}
CASES = [(flaw, *case) for flaw, cases in NEARLY_RIGHT.items() for case in cases]
LEFT_ALONE = (
    ("hermes", '<tool_call>\n{"name": "other", "arguments": null}\n</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "now", "arguments": {}}, {"name": "other", "arguments": {}}]\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": "[1]"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": " now", "arguments": {}}\n</tool_call>'),
    ("glm", "<tool_call>now\\\n</tool_call>"),
    ("qwen3_coder", "<function=other>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
    ("qwen3_coder", "Write <function=now> so."),
    ("llama3_json", '{"city": "Oslo"}\n{"name": "now", "parameters": {}}'),
)


def parsed(name: str, chunks: list[str], *, special: bool = False, mends: bool = True) -> tuple[Message, int]:
    spec = ResponseSpec(name, tools=TOOLS)
    parser = formats(name, special=special).parser(spec, "r", 0, mends=mends)
    return read(parser, chunks), parser.num_mended


def found(name: str, text: str, **how: bool) -> tuple[Message, int]:
    """Reads a text whole and character by character, which must be the same."""
    written = as_written(name, text, special=how.get("special", False))
    whole = parsed(name, [written], **how)
    assert parsed(name, list(written), **how) == whole, text
    return whole


def test_each_flaw_has_a_case_and_a_source() -> None:
    assert set(NEARLY_RIGHT) == set(Flaw)
    for flaw, name, *_ in CASES:
        assert FORMATS[name].known_flaws[flaw].startswith("https://")


@pytest.mark.parametrize(("flaw", "name", "text", "message"), CASES)
@pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are tokens"])
def test_a_known_flaw_is_mended_and_counted(flaw: Flaw, name: str, text: str, message: Message, special: bool) -> None:
    del flaw
    reply, num_mended = found(name, text, special=special)
    assert reply == message
    assert num_mended >= 1


@pytest.mark.parametrize(("flaw", "name", "text", "message"), CASES)
def test_nothing_is_mended_under_a_grammar(flaw: Flaw, name: str, text: str, message: Message) -> None:
    del flaw
    reply, num_mended = found(name, text, mends=False)
    assert (reply != message, num_mended) == (True, 0)


@pytest.mark.parametrize(("name", "text"), LEFT_ALONE)
def test_what_may_be_meant_otherwise_is_text(name: str, text: str) -> None:
    assert found(name, text) == (Message(text), 0)


def test_a_call_of_an_unknown_function_that_is_well_formed_stays_a_call() -> None:
    text = '<tool_call>\n{"name": "other", "arguments": {"a": 1}}\n</tool_call>'
    assert found("hermes", text) == (Message(calls=[("other", '{"a": 1}')]), 0)


@pytest.mark.parametrize(("flaw", "name", "text", "message"), CASES)
def test_a_flawed_call_that_is_cut_is_a_call_so_far_or_no_text(
    flaw: Flaw, name: str, text: str, message: Message
) -> None:
    del flaw
    for end in range(len(text)):
        parser = formats(name, special=False).parser(ResponseSpec(name, tools=TOOLS), "r", 0, mends=True)
        reply = Message()
        reply.take(parser.push(text[:end]))
        reply.take(parser.finish(ended=ReplyEnd.CUT))
        for (called, arguments), (wanted, whole) in zip(reply.calls, message.calls, strict=False):
            assert called == wanted
            assert whole.startswith(arguments.removesuffix("}")), text[:end]
        if FORMATS[name].calls.begin or FORMATS[name].calls.group_begin:  # so that there is a tag
            rest = "" if message.text.startswith(reply.text) else reply.text.removeprefix(message.text)
            assert len(rest.strip()) <= 1, text[:end]  # one character is not a tag yet


def edits(text: str) -> Iterator[str]:
    """Yields the text with one piece of it dropped, doubled, escaped, swapped with the next, or all cut behind it."""
    pieces = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)
    for place, piece in enumerate(pieces):
        before, after = "".join(pieces[:place]), "".join(pieces[place + 1 :])
        if "get_weather" not in piece:
            yield from (before + after, before + 2 * piece + after, before, f"{before}\\{piece}{after}")
            if pieces[place + 1 : place + 2] not in ([], ["get_weather"]):
                yield before + pieces[place + 1] + piece + "".join(pieces[place + 2 :])


@pytest.mark.parametrize("name", FORMATS)
def test_one_edit_gives_a_call_or_text(name: str) -> None:
    """Beside a whole call there is no markup; behind a broken one there is none where calls have an end tag."""
    format_ = FORMATS[name]
    right = write(name, Message(calls=[("get_weather", "")]), call_arguments=[{"city": "Oslo"}])
    tags = {*format_.delimiters} - {format_.calls.group_mark, format_.calls.group_mark_end}
    for text in edits(right):
        reply, _ = found(name, text)
        assert len(reply.calls) <= 1, text
        assert all(re.fullmatch(r"\w[\w.]*", called) for called, _ in reply.calls), text
        if reply.calls and is_json(reply.calls[0][1]):
            assert not any(tag in reply.text for tag in (*tags, "<function", "<parameter")), text
