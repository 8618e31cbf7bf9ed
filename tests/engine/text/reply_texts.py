"""Replies as models write them, of any message in any format, and what reading them gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.delta import DELIMITER, Delta, ReplyEnd
from penstock.engine.text.response.reading.parser import ReplyParser
from penstock.engine.text.response.reading.replies import ReplyFormats
from penstock.engine.text.response.syntax import Arguments, Calls, IdMarks, ReplyFormat

TOOLS = (
    Tool(
        "get_weather",
        json.dumps(
            {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}},
            }
        ),
    ),
    Tool("search"),
)


@dataclass
class Message:
    """A whole reply. A call is its name and the text of its arguments."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        calls = "".join(part for call in delta.tool_calls for part in (call.name or "", call.arguments))
        assert not DELIMITER.search(delta.text + delta.reasoning + calls)
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index == len(self.calls):
                assert call.name
                assert call.id
                self.calls.append((call.name, call.arguments))
                continue
            assert call.id is None
            assert call.name is None
            assert call.index == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + call.arguments)


@cache  # as a worker has one for all its replies: it keeps the dialects
def formats(name: str, *, special: bool) -> ReplyFormats:
    """Formats for a tokenizer that has all delimiters of a format as special tokens, or as ordinary text."""
    return ReplyFormats({tag: place for place, tag in enumerate(FORMATS[name].delimiters)} if special else {})


def parser(
    name: str,
    *,
    special: bool = False,
    prefix: str = "",
    tools: tuple[Tool, ...] = TOOLS,
    shows: bool = False,
    spec: ResponseSpec | None = None,
) -> ReplyParser:
    spec = spec or ResponseSpec(name, prefix=prefix, tools=tools)
    return formats(name, special=special).parser(spec, "r", 0, shows_special=shows)


def as_written(name: str, text: str, *, special: bool) -> str:
    """Returns `text` as a stream gives it to a parser; delimiters spelled in it were tokens."""
    return formats(name, special=special).dialect(name).written(text)


def read(reading: ReplyParser, chunks: Iterable[str], ended: ReplyEnd = ReplyEnd.ITSELF) -> Message:
    message = Message()
    for chunk in chunks:
        message.take(reading.push(chunk))
    message.take(reading.finish(ended=ended))
    return message


def write(name: str, message: Message, *, call_arguments: list[dict[str, object]] | None = None) -> str:
    """Writes `message` in the format's own syntax, as its chat template would."""
    format_ = FORMATS[name]
    parts: list[str] = []
    if message.reasoning and format_.reasoning is not None:
        parts.append(format_.reasoning.begin + message.reasoning + format_.reasoning.end)
    if message.text:
        end = format_.text_end if message.calls or not format_.has_messages else ""
        parts.append(format_.text_begin + message.text + end)
    written = [
        _call(format_.calls, call, arguments)
        for (call, _), arguments in zip(message.calls, call_arguments or [], strict=True)
    ]
    if written:
        calls = format_.calls
        joined = (calls.separator if calls.is_grouped or calls.separator else "").join(written)
        parts.append(calls.group_mark + calls.group_begin + joined + calls.group_end + calls.group_mark_end)
    return _joined(format_, parts)


def _joined(format_: ReplyFormat, parts: list[str]) -> str:
    if format_.has_messages:
        return format_.next_part.join(parts)
    return "".join(parts)


def _call(calls: Calls, name: str, arguments: dict[str, object]) -> str:
    return calls.begin + _body(calls, name, arguments) + calls.end


def _body(calls: Calls, name: str, arguments: dict[str, object]) -> str:
    if calls.arguments is Arguments.OBJECT:
        ids = {"tool_call_id": _an_id(calls.id)} if calls.id else {}
        return json.dumps({**ids, calls.name_key: name, calls.arguments_key: arguments}, ensure_ascii=False)
    if calls.arguments is Arguments.JSON:
        return _named(calls, name) + calls.after_name + json.dumps(arguments, ensure_ascii=False)
    if calls.arguments is Arguments.PYTHON:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if calls.arguments is Arguments.BARE_KEYS:
        return name + _bare(arguments, calls.quote)
    assert calls.parameter is not None
    before_key, before_value, end = calls.parameter.before_key, calls.parameter.before_value, calls.parameter.end
    before_text = calls.parameter.before_text or before_value
    parameters = (
        before_key + key + (before_text + value if isinstance(value, str) else before_value + json.dumps(value)) + end
        for key, value in arguments.items()
    )
    return name + calls.after_name + "".join(parameters)


def _named(calls: Calls, name: str) -> str:
    marks = calls.id
    if marks is None:
        return name
    written = marks.before + _an_id(marks) + marks.after
    return name + written if marks.is_behind_name else written + name


def _an_id(marks: IdMarks) -> str:
    return next(id_ for id_ in ("a1b2c3d4e", "7") if re.fullmatch(marks.pattern, id_))


def _bare(value: object, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(item, quote) for item in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
