"""Reads tool calls, as they arrive, in the syntax of one format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.engine.request import Tool
from penstock.engine.text.response.reading.casting import ArgumentsSchema
from penstock.engine.text.response.reading.delta import DELIMITER, Collector
from penstock.engine.text.response.reading.json_text import read_text, read_value, to_json
from penstock.engine.text.response.reading.literals import read_key, read_literal
from penstock.engine.text.response.reading.source import MAX_NAME_CHARS, Malformed, Reading, TextCursor
from penstock.engine.text.response.syntax import Arguments, Calls, ParameterMarks

MAX_KEY_CHARS = 1024

_ARGUMENTS_KEYS = ("arguments", "parameters")  # models mix them up
_FIRST_KEYS = ("name", "type")  # of an untagged call
# Find the name of an untagged call, or its beginning.
_UNMARKED_NAMES: Mapping[Arguments, re.Pattern[str]] = MappingProxyType(
    {
        Arguments.OBJECT: re.compile(r'"name"\s*:\s*"([^"\\]+)'),
        Arguments.PYTHON: re.compile(r"\[\s*([^\s(]+)"),
    }
)


class CallReader:
    """Reads calls from a source into a collector.

    A call begins for the collector once it certainly is one; its name alone does not make it certain. Malformed is
    raised at the first character that does not fit; what has been collected by then stays.
    """

    def __init__(self, calls: Calls, tools: Sequence[Tool], collector: Collector) -> None:
        self._calls = calls
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._schemas: dict[str, ArgumentsSchema] = {}
        self._collector = collector

    def read(self, source: TextCursor, *, is_marked: bool) -> Reading[None]:
        """Reads a group of calls or, if the format has no groups, one. Unmarked calls must be of known tools."""
        calls = self._calls
        if calls.group_mark:
            yield from source.accept(calls.group_mark)
        yield from source.expect(calls.group_begin)
        yield from self._call(source, is_marked)
        while calls.is_grouped:
            if calls.group_end and (yield from source.accept(calls.group_end)):
                return
            if calls.separator.strip() and not (yield from source.accept(calls.separator)):
                return
            yield from self._call(source, is_marked)

    def names_a_tool(self, text: str) -> bool:
        """Whether `text`, an unfinished call without a tag, has begun the name of a tool."""
        pattern = _UNMARKED_NAMES.get(self._calls.arguments)
        match = pattern.search(text) if pattern else None
        return match is not None and any(name.startswith(match[1]) for name in self._tools)

    def read_arguments(self, source: TextCursor, name: str) -> Reading[None]:
        """Reads the JSON object with a call's arguments, and what ends the call."""
        yield from self._json(source, name)
        yield from self._end(source)

    def _json(self, source: TextCursor, name: str) -> Reading[None]:
        if (yield from source.skip_space()) != "{":
            raise Malformed
        self._begin(source, name)
        yield from read_value(source, lambda text: self._arguments(source, text))
        self._collector.end_call()

    def _end(self, source: TextCursor) -> Reading[None]:
        """Reads what ends a call, as far as the model writes it."""
        for word in self._calls.end.split():
            if not (yield from source.accept(word)):
                return

    def _call(self, source: TextCursor, is_marked: bool) -> Reading[None]:
        yield from source.expect(self._calls.begin)
        if self._calls.arguments is Arguments.OBJECT:
            yield from self._object(source, is_marked)
        else:
            yield from self._skip_id(source, is_behind_name=False)
            name = yield from source.name()
            self._check(name, is_marked)
            yield from self._skip_id(source, is_behind_name=True)
            yield from self._named(source, name)
        source.settle()

    def _skip_id(self, source: TextCursor, *, is_behind_name: bool) -> Reading[None]:
        marks = self._calls.id
        if marks is None or marks.is_behind_name != is_behind_name:
            return
        if marks.before and not (yield from source.accept(marks.before)):
            return
        yield from source.name()
        yield from source.expect(marks.after)

    def _named(self, source: TextCursor, name: str) -> Reading[None]:
        calls = self._calls
        if calls.arguments is Arguments.JSON:
            yield from source.accept(calls.after_name)
            yield from self.read_arguments(source, name)
        elif calls.parameter is not None:
            yield from source.expect(calls.after_name)
            yield from self._parameters(source, name, calls.parameter)
        elif calls.arguments is Arguments.PYTHON:
            yield from self._literals(source, name, ("(", "=", ")"))
        else:
            yield from self._literals(source, name, ("{", ":", "}"))

    def _object(self, source: TextCursor, is_marked: bool) -> Reading[None]:
        """Reads an object with a name and arguments, in any order and among other keys; arguments may be missing."""
        name = ""
        held: list[str] | None = None  # arguments that come before the name
        has_begun = False
        yield from source.expect("{")
        while True:
            key = yield from self._key(source)
            if not (is_marked or name or key in _FIRST_KEYS):
                raise Malformed  # an answer in JSON
            if key == self._calls.name_key and not name:
                name = yield from read_text(source)
                self._check(name, is_marked)
            elif key in _ARGUMENTS_KEYS and name and not has_begun:
                yield from self._json(source, name)
                has_begun = True
            elif key in _ARGUMENTS_KEYS and held is None and not has_begun:
                held = yield from self._held_arguments(source)
            else:
                yield from read_value(source, lambda text: None)
            if has_begun and (yield from source.skip_space()) not in ",}":
                break  # everything that matters has been read
            if (yield from source.expect(",", "}")):
                break
        if not has_begun:
            self._whole(source, name, held or (["{}"] if is_marked else []))
        yield from self._end(source)

    def _key(self, source: TextCursor) -> Reading[str]:
        yield from source.skip_space()
        key = yield from read_text(source)
        yield from source.expect(":")
        yield from source.skip_space()
        return key

    def _held_arguments(self, source: TextCursor) -> Reading[list[str]]:
        if (yield from source.peek()) != "{":
            raise Malformed
        held: list[str] = []
        yield from read_value(source, held.append)
        return held

    def _whole(self, source: TextCursor, name: str, arguments: list[str]) -> None:
        if not name or not arguments:
            raise Malformed
        self._begin(source, name)
        self._arguments(source, "".join(arguments))
        self._collector.end_call()

    def _parameters(self, source: TextCursor, name: str, parameter: ParameterMarks) -> Reading[None]:
        seen: set[str] = set()
        while not (yield from source.expect(parameter.before_key, self._calls.end.split()[0])):
            key = yield from source.until(parameter.before_value.split()[0], MAX_KEY_CHARS)
            yield from source.expect(parameter.before_value.strip())
            value = DELIMITER.sub("", (yield from self._value(source, parameter)))
            key = DELIMITER.sub("", key).strip()
            self._argument(source, name, seen, key, self._schema(name).cast(key, value))
        self._close(source, name, seen)
        for word in self._calls.end.split()[1:]:
            yield from source.accept(word)

    def _value(self, source: TextCursor, parameter: ParameterMarks) -> Reading[str]:
        """Reads the text of a value, without the line breaks that belong to the syntax."""
        if parameter.before_value.endswith("\n") and (yield from source.peek()) == "\n":
            source.place += 1
        value = yield from source.until(parameter.end.strip())
        yield from source.expect(parameter.end.strip())
        return value.removesuffix("\n") if parameter.end.startswith("\n") else value

    def _literals(self, source: TextCursor, name: str, signs: tuple[str, str, str]) -> Reading[None]:
        """Reads arguments between the first and the last of `signs`, with the middle one after each key."""
        opener, equals, closer = signs
        quote = self._calls.quote
        seen: set[str] = set()
        yield from source.expect(opener)
        while not (yield from source.accept(closer)):
            key = yield from (read_key(source, quote) if quote else source.name())
            yield from source.expect(equals)
            self._argument(source, name, seen, key, (yield from read_literal(source, quote)))
            yield from source.accept(",")
        self._close(source, name, seen)
        yield from self._end(source)

    def _argument(self, source: TextCursor, name: str, seen: set[str], key: str, value: object) -> None:
        """Emits an argument. If one is repeated, the first counts: it has been sent before the others come."""
        if key in seen:
            source.settle()
            return
        if not seen:
            self._begin(source, name)
        self._arguments(source, f"{', ' if seen else '{'}{to_json(key)}: {to_json(value)}")
        seen.add(key)

    def _close(self, source: TextCursor, name: str, seen: set[str]) -> None:
        if not seen:
            self._begin(source, name)
        self._arguments(source, "}" if seen else "{}")
        self._collector.end_call()

    def _begin(self, source: TextCursor, name: str) -> None:
        if len(name) > MAX_NAME_CHARS or DELIMITER.search(name):
            raise Malformed  # JSON can spell half a character, but nothing else can
        self._collector.begin_call(name)
        source.settle()

    def _arguments(self, source: TextCursor, text: str) -> None:
        self._collector.arguments(text)
        source.settle()

    def _check(self, name: str, is_marked: bool) -> None:
        if not name or not (is_marked or name in self._tools):
            raise Malformed

    def _schema(self, name: str) -> ArgumentsSchema:
        if name not in self._schemas:
            self._schemas[name] = ArgumentsSchema(self._tools[name].parameters if name in self._tools else "{}")
        return self._schemas[name]
