"""Reads what is nearly right, where nothing else can be meant: see `flaws.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

from penstock.engine.text.response.reading.json_text import to_json
from penstock.engine.text.response.reading.source import Malformed, Reading, TextCursor
from penstock.engine.text.response.syntax import Calls, ParameterMarks

MAX_BROKEN_CHARS = 1024  # of a broken call, up to its end tag
MAX_LEFT_OVER = 16  # characters
_LEFT_OVER = " \t\r\n\\}])`,"
MAX_TAG_CHARS = 1024  # from the end of a value without its tag to what shows that


def object_text(text: str) -> str:
    """Returns a text that is a JSON object. Raises Malformed if it is none."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not is_object:
        raise Malformed
    return text.strip()


def listed_calls(
    text: str, name_key: str, arguments_keys: Iterable[str], tools: Collection[str]
) -> list[tuple[str, str]]:
    """Returns names and arguments of a JSON list of calls. Raises Malformed if it has anything else, or nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not found:
        raise Malformed
    return [_listed_call(each, name_key, arguments_keys, tools) for each in found]


def _listed_call(call: object, name_key: str, keys: Iterable[str], tools: Collection[str]) -> tuple[str, str]:
    if not isinstance(call, dict) or call.get(name_key) not in tools:
        raise Malformed
    arguments = [call[key] for key in keys if key in call]
    if len(arguments) != 1 or not isinstance(arguments[0], dict):
        raise Malformed
    return call[name_key], to_json(arguments[0])


def value_without_end(
    source: TextCursor, calls: Calls, parameter: ParameterMarks, keys: Collection[str]
) -> Reading[tuple[str, bool]]:
    """Reads a value up to its end, or up to what shows that its end is missing; returns whether it has one.

    That is a line which begins another parameter of the same tool, one of `keys`, or the end of the call if the reply
    ends there or another call follows.
    """
    end = parameter.end.strip()
    next_key = "|".join(map(re.escape, sorted(keys, key=len, reverse=True))) or "(?!)"
    another = re.compile(
        rf"\n[ \t]*{re.escape(parameter.before_key)}(?:{next_key}){re.escape(parameter.before_value[:1])}"
    )
    last = re.compile(r"\s*".join(map(re.escape, [*calls.end.split(), ""])))
    first_tag = calls.begin.split()[0]
    seen = source.place
    while True:
        place = source.text.find(end, seen)
        limit = place if place >= 0 else len(source.text)
        if found := another.search(source.text, max(source.place, seen - MAX_TAG_CHARS), limit):
            return source.take(found.start() - source.place), False
        closing = last.search(source.text, max(source.place, seen - MAX_TAG_CHARS), limit)
        if closing and _is_last(source, closing.end(), first_tag):
            return source.take(closing.start() - source.place), False
        if place >= 0:
            return source.take(place - source.place), True
        first = source.place
        seen = max(first, len(source.text) - len(end) + 1)
        yield from source.more()
        seen += source.place - first


def broken_rest(source: TextCursor, tag: str) -> Reading[bool]:
    """Reads the rest of a broken call up to its end tag; returns whether there is one."""
    while (place := source.text.find(tag, source.place)) < 0:
        if source.has_ended or len(source.rest()) > MAX_BROKEN_CHARS:
            return False
        yield from source.more()
    source.place = place + len(tag)
    return True


def stray_ends(source: TextCursor, tags: Collection[str]) -> Reading[bool]:
    """Reads what is left of a call's end after it: tags, with brackets in front; returns whether there was any."""
    found = False
    while True:
        source.settle()
        rest = source.text[source.place :]
        behind = rest.lstrip(_LEFT_OVER)
        num_left = len(rest) - len(behind)
        tag = next((tag for tag in tags if behind.startswith(tag)), None)
        if tag is not None:
            source.place += num_left + len(tag)
            found = True
        elif num_left > MAX_LEFT_OVER or not any(tag.startswith(behind) for tag in tags):
            return found
        elif source.has_ended:
            if not source.is_whole:
                source.place = len(source.text)  # what may stand before such a tag, and its beginning
            return found
        else:
            yield from source.more()


def _is_last(source: TextCursor, place: int, first_tag: str) -> bool:
    rest = source.text[place:]
    return rest.startswith(first_tag) or (not rest and source.is_whole)
