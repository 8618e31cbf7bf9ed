"""What a request demands of its reply: which calls it may have, and what its text must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallRule:
    """How a reply may call its tools."""

    required: bool = False  # it calls a tool, and says nothing else
    at_most_one: bool = False
    restricted: bool = False  # the prompt also shows other tools, which must not be called


FREE = CallRule()


@dataclass(frozen=True, slots=True)
class JsonText:
    """The text is JSON that follows a schema."""

    schema: str = '{"type": "object"}'
    strict: bool = False  # objects have only the listed properties, unless they say otherwise


@dataclass(frozen=True, slots=True)
class RegexText:
    """The whole text matches a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """The text is one of these options."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LarkText:
    """The text follows a grammar in llguidance's dialect of Lark."""

    grammar: str


TextRule = JsonText | RegexText | ChoiceText | LarkText
