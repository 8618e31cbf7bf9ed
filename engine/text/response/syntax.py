"""Describes the format in which chat models write their replies; parser and grammar are built from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum

from penstock.engine.text.response.flaws import STRAY, Flaw


class Arguments(Enum):
    """How a call spells its arguments, and with them its name."""

    OBJECT = "object"  # one JSON object: {name_key: NAME, arguments_key: {...}}
    JSON = "json"  # NAME, then a JSON object
    PARAMETERS = "parameters"  # NAME, then each value between tags; strings are bare, all others JSON
    PYTHON = "python"  # NAME(key=value, ...), values as Python writes them
    BARE_KEYS = "bare keys"  # NAME, then {key:value, ...}: keys bare, strings between two `quote`s, others JSON


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """`begin` REASONING `end`, at the beginning of a reply."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """`before_key` KEY `before_value` VALUE `end`."""

    before_key: str
    before_value: str
    end: str
    before_text: str = ""  # in place of `before_value`, if strings are marked as such


@dataclass(frozen=True, slots=True)
class IdMarks:
    """`before` ID `after`: what a model writes for its own bookkeeping, and no client gets."""

    before: str
    pattern: str  # of an id, as a regular expression
    after: str = ""
    is_behind_name: bool = False  # otherwise it comes before the name; in an OBJECT, as its first key
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls: `group_begin` CALL `separator` CALL ... `group_end`.

    A CALL is `begin` BODY `end`; BODY depends on `arguments`:

        OBJECT      {`name_key`: NAME, `arguments_key`: {...}}
        JSON        NAME `after_name` {...}
        PARAMETERS  NAME `after_name` PARAMETER PARAMETER ...
        PYTHON      NAME(key=value, ...)
        BARE_KEYS   NAME {key:value, ...}

    An `id` comes before a NAME or after it. If a model writes white space in these, the parser takes any, or none. It
    also takes calls without `end` or `group_end`, except for PARAMETERS, where only `end` says that no other parameter
    follows.
    """

    arguments: Arguments
    begin: str = ""
    end: str = ""
    group_begin: str = ""  # empty with an empty `begin`: calls only count at the beginning of a reply
    group_end: str = ""
    separator: str = ""
    after_name: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id: IdMarks | None = None
    parameter: ParameterMarks | None = None
    quote: str = ""
    group_mark: str = ""  # may precede `group_begin`; then calls count anywhere
    group_mark_end: str = ""  # may follow `group_end`

    @property
    def behind_tag(self) -> str:
        """What follows the first tag of a call, such as `<function=` after `<tool_call>`."""
        return self.begin.rpartition("\n")[2]

    @property
    def is_grouped(self) -> bool:
        """Whether another call may follow a call without repeating what begins the first."""
        return bool(self.group_end or self.separator.strip() or not self.begin)


@dataclass(frozen=True, slots=True)
class TurnMarks:
    anchors: tuple[str, ...] = ()  # a prompt has one of these before a reply
    end: str = ""  # follows a reply


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a family of models writes its replies: REASONING? (text | CALLS)*."""

    name: str
    calls: Calls
    reasoning: ReasoningMarks | None = None
    text_begin: str = ""  # before text, if even that has a delimiter or a white space of its own
    text_end: str = ""  # after text; in a format of messages, if another one follows
    next_part: str = ""  # between two parts, if each is a message with a header
    delimiters: tuple[str, ...] = ()  # pieces of syntax that may be one token, often a special one
    turn: TurnMarks = TurnMarks()
    flaws: Mapping[Flaw, str] = field(default_factory=dict, hash=False)  # that its models' calls have, and the sources
    marks: tuple[str, ...] = ()  # a chat template that prints no calls has this format if it has all of them

    @property
    def known_flaws(self) -> Mapping[Flaw, str]:
        """Flaws of its calls, and their sources. Any tag may be there twice."""
        opening = self.pieces(self.calls.group_begin or self.calls.begin)[:1]
        is_tagged = not self.has_messages and opening and opening[0] in self.delimiters
        return {**STRAY, **self.flaws} if is_tagged else self.flaws

    def special_within(self, special_tokens: Iterable[str]) -> tuple[str, ...]:
        """Returns the special tokens that its syntax has: its delimiters, and those that are a part of a tag."""
        syntax = "\0".join(_texts((self.calls, self.reasoning, self.text_begin, self.text_end, self.next_part)))
        return tuple(token for token in special_tokens if token in self.delimiters or is_inside(token, syntax))

    def without_reasoning(self) -> ReplyFormat:
        """Returns the format that leaves reasoning in the text. Messages have headers that tell what they are."""
        return self if self.has_messages else replace(self, reasoning=None)

    @property
    def has_messages(self) -> bool:
        """Whether a reply is a row of messages, each with a header."""
        return bool(self.next_part)

    def pieces(self, syntax: str) -> tuple[str, ...]:
        """Splits `syntax` into delimiters and ordinary text. Joined, the pieces are `syntax`."""
        longest_first = sorted(self.delimiters, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        return tuple(piece for piece in re.split(f"({pattern})", syntax) if piece)


def is_inside(special_token: str, syntax: str) -> bool:
    """Whether a piece of syntax contains a special token. Words and white space of a text are not tokens there."""
    return special_token in syntax and not special_token.isalnum() and not special_token.isspace()


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a part of a format."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        yield from (text for each in fields(value) for text in _texts(getattr(value, each.name)))
    elif isinstance(value, tuple):
        yield from (text for each in value for text in _texts(each))
