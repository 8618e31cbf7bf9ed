"""Reads tool calls, as they arrive, in the syntax of one format."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from penstock.engine.request import Tool
from penstock.engine.text.response.flaws import Flaw
from penstock.engine.text.response.reading.casting import ArgumentsSchema
from penstock.engine.text.response.reading.delta import DELIMITER, Collector
from penstock.engine.text.response.reading.json_text import read_text, read_value, to_json
from penstock.engine.text.response.reading.literals import read_key, read_literal
from penstock.engine.text.response.reading.mending import (
    broken_rest,
    listed_calls,
    object_text,
    stray_ends,
    value_without_end,
)
from penstock.engine.text.response.reading.source import MAX_NAME_CHARS, Malformed, Reading, TextCursor
from penstock.engine.text.response.syntax import Arguments, Calls, ParameterMarks

MAX_KEY_CHARS = 1024
# Names of functions that the request does not have: of ASCII, letters, digits and what is usual between them.
_WELL_FORMED = re.compile(r"(?![.:/-])[\w.:/$@\x80-\U0010ffff-]+(?<![.:/-])")
_TAG = re.compile("<[^<>]+>|[\ud800-\udfff]")

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

    A call begins for the collector once its first argument, or the beginning of its JSON, has come: until then, what
    follows its name may show that it is not a call. Malformed is raised at the first character that does not fit; what
    has been collected by then stays.
    """

    def __init__(
        self, calls: Calls, tools: Sequence[Tool], collector: Collector, flaws: Collection[Flaw] = frozenset()
    ) -> None:
        """`flaws` are those that are mended, in calls of `tools`."""
        self._calls = calls
        self._flaws = flaws
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._schemas: dict[str, ArgumentsSchema] = {}
        self._collector = collector
        self._end_tags = _TAG.findall(calls.end + calls.group_end) if Flaw.STRAY_TAG in flaws else []
        self._name = ""  # of the newest call
        self._announced: tuple[str, str] | None = None  # name and arguments of a call that has not begun yet
        self._lacks_end = False  # whether a parameter of the call that is read had no end

    def read(self, source: TextCursor, *, is_marked: bool, tag: str = "") -> Reading[None]:
        """Reads a group of calls or, if the format has no groups, one. Unmarked calls must be of known tools.

        A marked one begins with `tag`. If that is there twice, the calls must be of known tools, too.
        """
        self._announced = None
        if tag and Flaw.NO_OPENING in self._flaws and (yield from source.accept(f"{tag}\n\\")):
            yield from self.read_unopened(source)
            return
        is_double = bool(tag) and Flaw.STRAY_TAG in self._flaws and (yield from source.sees(f"{tag}\n{tag}"))
        if is_double:
            yield from source.accept(tag)
        num_calls = self._collector.num_calls
        try:
            yield from self._group(source, is_marked and not is_double)
            if self._calls.group_mark_end:
                yield from source.accept(self._calls.group_mark_end)
        except Malformed:
            is_known = bool(self._end_tags) and self._name in self._tools
            if self._collector.num_calls == num_calls or not is_known or source.is_cut_off:
                raise
            source.rewind()
            if self._collector.is_open and not (yield from broken_rest(source, self._end_tags[-1])):
                raise
        has_stray = self._name in self._tools and (yield from stray_ends(source, self._end_tags))
        if is_double or (has_stray and not self._collector.is_open):
            self._collector.mended()

    def _group(self, source: TextCursor, is_marked: bool) -> Reading[None]:
        calls = self._calls
        if calls.group_mark:
            yield from source.accept(calls.group_mark)
        yield from source.expect(calls.group_begin)
        yield from self._call(source, is_marked)
        while calls.is_grouped:
            if calls.group_end and (yield from source.accept(calls.group_end)):
                return
            if not calls.separator.strip() or (yield from source.accept(calls.separator)):
                yield from self._call(source, is_marked)
            elif not (yield from self._otherwise_divided(source)):
                return

    def read_unopened(self, source: TextCursor) -> Reading[None]:
        """Reads a call of a known tool whose first tag is missing."""
        self._announced = None
        yield from source.expect(self._calls.behind_tag)
        name = yield from source.name()
        self._announce(name, is_marked=False)
        yield from self._named(source, name)
        self._collector.mended()
        source.settle()

    def _otherwise_divided(self, source: TextCursor) -> Reading[bool]:
        """Reads a call of a known tool after a comma or a line break, if there is one."""
        if Flaw.OTHER_SEPARATOR not in self._flaws:
            return False
        first = yield from source.next_or_end()
        is_divided = first == "," or "\n" in source.unsettled()[: -len(source.rest()) or None]
        source.place += first == ","
        num_calls = self._collector.num_calls
        try:
            begins = is_divided and (yield from source.next_or_end()) == "{"
            if begins:
                yield from self._call(source, is_marked=False)
        except Malformed:
            if self._collector.num_calls > num_calls or (source.is_cut_off and not source.is_whole):
                raise
            begins = False
        if begins:
            self._collector.mended()
        else:
            source.rewind()
        return begins

    def names_a_tool(self, text: str) -> bool:
        """Whether `text`, an unfinished call without its first tag, has begun the name of a tool."""
        if Flaw.NO_OPENING in self._flaws and text.startswith(self._calls.behind_tag):
            begun: str | None = text.removeprefix(self._calls.behind_tag).lstrip()
        else:
            pattern = _UNMARKED_NAMES.get(self._calls.arguments)
            match = pattern.search(text) if pattern else None
            begun = match[1] if match else None
        return begun is not None and any(name.startswith(begun) for name in self._tools)

    def begin_announced(self, source: TextCursor) -> None:
        """Begins the call whose name has been read, if it has not begun: the reply was cut off after its name."""
        if self._announced is None:
            return
        name, arguments = self._announced
        try:
            self._begin(source, name)
        except Malformed:
            return
        self._arguments(source, arguments)

    def read_arguments(self, source: TextCursor, name: str) -> Reading[None]:
        """Reads the JSON object with a call's arguments, and what ends the call."""
        self._announce(name, is_marked=True)
        yield from self._json(source, name)
        yield from self._end(source)

    def _json(self, source: TextCursor, name: str) -> Reading[None]:
        first = yield from source.next_or_end()
        if first == "{":
            mend = self._collector.mended if self._mends(Flaw.LONE_BACKSLASH, name) else None
            self._begin(source, name)
            yield from read_value(source, lambda text: self._arguments(source, text), mend)
        else:
            arguments = yield from self._flawed_arguments(source, name, first)
            self._begin(source, name)
            self._collector.mended()
            self._arguments(source, arguments)
        self._collector.end_call()

    def _mends(self, flaw: Flaw, name: str) -> bool:
        return flaw in self._flaws and name in self._tools

    def _flawed_arguments(self, source: TextCursor, name: str, first: str) -> Reading[str]:
        """Returns the arguments of a call that has none as an object; `first` is what it has, nothing at the end."""
        if first == '"' and self._mends(Flaw.TEXT_ARGUMENTS, name):
            arguments = object_text((yield from read_text(source)))
            yield from self._expect_close(source)
            return arguments
        if first == "n" and self._mends(Flaw.NULL_ARGUMENTS, name):
            yield from source.expect("null")
            yield from self._expect_close(source)
            return "{}"
        if self._mends(Flaw.NO_BODY, name) and not self._schema(name).required:
            has_ended = (yield from source.sees(self._calls.end)) if first else source.is_whole
            if has_ended:
                return "{}"
        if not first:
            yield from source.more()
        raise Malformed

    def _expect_close(self, source: TextCursor) -> Reading[None]:
        """Makes sure that a value of an object ends here."""
        if (yield from source.skip_space()) not in ",}":
            raise Malformed

    def _end(self, source: TextCursor) -> Reading[None]:
        """Reads what ends a call, as far as the model writes it."""
        for word in self._calls.end.split():
            if not (yield from source.accept(word)):
                return

    def _call(self, source: TextCursor, is_marked: bool) -> Reading[None]:
        self._announced = None
        yield from source.expect(self._calls.begin)
        if self._calls.arguments is Arguments.OBJECT:
            is_list = Flaw.LIST in self._flaws and (yield from source.next_or_end()) == "["
            yield from self._listed(source) if is_list else self._object(source, is_marked)
        else:
            yield from self._skip_id(source, is_behind_name=False)
            name = self._without_id((yield from source.name()))
            self._announce(name, is_marked)
            yield from self._skip_id(source, is_behind_name=True)
            yield from self._named(source, name)
        source.settle()

    def _listed(self, source: TextCursor) -> Reading[None]:
        """Reads a list of calls of known tools; none of them is passed on before all are known to be calls."""
        written: list[str] = []
        yield from read_value(source, written.append)
        for name, arguments in listed_calls("".join(written), self._calls.name_key, _ARGUMENTS_KEYS, self._tools):
            self._begin(source, name)
            self._collector.mended()
            self._arguments(source, arguments)
            self._collector.end_call()
        yield from self._end(source)

    def _without_id(self, name: str) -> str:
        """Returns a name without the id that some models write as its end."""
        marks = self._calls.id
        if marks is None or not marks.is_behind_name:
            return name
        front, _, id_ = name.rpartition(marks.before)
        return front if front and re.fullmatch(marks.pattern, id_) else name

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
            if not (is_marked or name or key in _FIRST_KEYS or self._end_tags):
                raise Malformed  # an answer in JSON
            if key == self._calls.name_key and not name:
                name = yield from read_text(source)
                self._announce(name, is_marked, "".join(held or ()))
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
            kinds = [mark.strip() for mark in (parameter.before_value, parameter.before_text) if mark]
            is_text = bool((yield from source.expect(*kinds)))
            value = DELIMITER.sub("", (yield from self._value(source, parameter, name, {*seen, key.strip()})))
            key = DELIMITER.sub("", key).strip()
            self._argument(source, name, seen, key, value if is_text else self._schema(name).cast(key, value))
        self._close(source, name, seen)
        for word in self._calls.end.split()[1:]:
            yield from source.accept(word)

    def _value(self, source: TextCursor, parameter: ParameterMarks, name: str, seen: Collection[str]) -> Reading[str]:
        """Reads the text of a value, without the line breaks that belong to the syntax. `seen` are the keys so far."""
        if parameter.before_value.endswith("\n") and (yield from source.peek()) == "\n":
            source.place += 1
        if self._mends(Flaw.NO_PARAMETER_END, name):
            keys = self._schema(name).names - frozenset(seen)
            value, has_end = yield from value_without_end(source, self._calls, parameter, keys)
        else:
            value, has_end = (yield from source.until(parameter.end.strip())), True
        if has_end:
            yield from source.expect(parameter.end.strip())
        self._lacks_end |= not has_end
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
        if self._lacks_end:
            self._collector.mended()
            self._lacks_end = False
        self._collector.end_call()

    def _begin(self, source: TextCursor, name: str) -> None:
        if len(name) > MAX_NAME_CHARS or DELIMITER.search(name):
            raise Malformed  # JSON can spell half a character, but nothing else can
        self._collector.begin_call(name)
        self._name = name
        self._announced = None
        source.settle()

    def _arguments(self, source: TextCursor, text: str) -> None:
        self._collector.arguments(text)
        source.settle()

    def _announce(self, name: str, is_marked: bool, arguments: str = "") -> None:
        """Notes the name of a call that may follow, and the arguments that came before it."""
        if name not in self._tools and not (is_marked and _WELL_FORMED.fullmatch(name)):
            raise Malformed
        self._announced = (name, arguments)

    def _schema(self, name: str) -> ArgumentsSchema:
        if name not in self._schemas:
            self._schemas[name] = ArgumentsSchema(self._tools[name].parameters if name in self._tools else "{}")
        return self._schemas[name]
