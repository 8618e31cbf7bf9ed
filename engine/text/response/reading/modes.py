"""The tags that are looked for in each part of a reply, in the form that transformers' `ResponseParser` takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.engine.text.response.flaws import Flaw
from penstock.engine.text.response.reading.delta import DELIMITER
from penstock.engine.text.response.reading.messages import Framing, framing
from penstock.engine.text.response.syntax import ReasoningMarks, ReplyFormat

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_Tags = dict[str, tuple[str, ...]]  # by the part that they begin

PART = "part"  # field of a part's content; other fields are named after what their tags begin
TEXT, REASONING, CALLS, UNMARKED_CALLS, HEADER = "text", "reasoning", "calls", "unmarked_calls", "header"
UNOPENED_CALLS = "unopened_calls"
AT_START = "_at_start"  # suffix of a field's name


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of part, and the tags that end it."""

    is_reasoning: bool = False
    scanner: Callable[[], ResponseParser] | None = None  # makes what finds the tags; None: nothing ends it
    first: re.Pattern[str] | None = None  # matches the first character of all its tags; None: any character

    def first_place(self, text: str) -> int:
        """Returns the first index in `text` where a tag might begin, or -1."""
        if self.scanner is None:
            return -1
        if self.first is None:
            return 0
        match = self.first.search(text)
        return match.start() if match else -1


@dataclass(frozen=True, slots=True)
class Modes:
    start: Mode  # of a reply; the first text ends it
    text: Mode
    reasoning: Mode
    frame: Framing | None
    skips_space: bool = False  # whether white space at the start belongs to the format


def modes(format_: ReplyFormat, *, has_tools: bool, flaws: Collection[Flaw] = frozenset()) -> Modes:
    """Makes the modes of `format_`, which is written as in a `dialect`; `flaws` are those that are mended."""
    frame = framing(format_)
    if frame is not None:
        tags = {HEADER: frame.begins, TEXT: frame.ends}
        return Modes(_mode(tags, {HEADER: "to="}), _mode(tags), _mode(tags, is_reasoning=True), frame)
    anywhere, at_start, ends = _reasoning_tags(format_.reasoning)
    if borders := tuple(filter(None, (format_.text_begin.strip(), format_.text_end.strip()))):
        anywhere[TEXT] = borders
    if has_tools:
        anywhere |= _call_tags(format_)
        at_start |= _unmarked_calls(format_)
        if Flaw.NO_OPENING in flaws:
            anywhere[UNOPENED_CALLS] = (format_.calls.behind_tag,)
    start, text, reasoning = _mode(anywhere, at_start), _mode(anywhere), _mode(ends, is_reasoning=True)
    return Modes(start, text, reasoning, None, skips_space=format_.text_begin.isspace())


def _reasoning_tags(reasoning: ReasoningMarks | None) -> tuple[_Tags, dict[str, str], _Tags]:
    """Returns the tags that count anywhere in text, at its start, and in reasoning.

    A tag that is ordinary text begins reasoning only at the start.
    """
    if reasoning is None:
        return {}, {}, {}
    begin = reasoning.begin.strip()
    ends: _Tags = {TEXT: (reasoning.end.strip(),)}
    return ({REASONING: (begin,)}, {}, ends) if DELIMITER.match(begin) else ({}, {REASONING: begin}, ends)


def _call_tags(format_: ReplyFormat) -> _Tags:
    calls = format_.calls
    tags = (calls.group_mark, *format_.pieces(calls.group_begin or calls.begin)[:1])
    marked = tuple(tag for tag in tags if tag in format_.delimiters)
    return {CALLS: marked} if marked else {}


def _unmarked_calls(format_: ReplyFormat) -> dict[str, str]:
    calls = format_.calls
    opener = calls.group_begin or calls.begin or "{"
    return {} if format_.pieces(opener)[0] in format_.delimiters else {UNMARKED_CALLS: opener}


def _mode(tags: _Tags, at_start: Mapping[str, str] | None = None, *, is_reasoning: bool = False) -> Mode:
    fields: dict[str, Any] = {PART: {}}
    for name, literals in tags.items():
        fields[name] = {"open": list(literals)}
    for name, tag in (at_start or {}).items():
        fields[name + AT_START] = {"open_pattern": rf"\A\s*{re.escape(tag)}"}
    if len(fields) == 1:
        return Mode(is_reasoning)
    from transformers.utils.chat_parsing import ResponseParser  # as in `Folder.tokenizer`
    from transformers.utils.chat_parsing.response_templates import load_response_template

    template = load_response_template({"start_anchor": "-", "fields": fields})
    return Mode(is_reasoning, partial(ResponseParser, template, prefix=""), None if at_start else _first_of(tags))


def _first_of(tags: _Tags) -> re.Pattern[str]:
    return re.compile(
        "[" + re.escape("".join(sorted({tag[0] for literals in tags.values() for tag in literals}))) + "]"
    )
