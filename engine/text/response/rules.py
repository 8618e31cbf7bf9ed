"""What a request asks of its reply: which calls it may have, and what its text must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallRule:
    """How a reply may call the tools that it may call."""

    required: bool = False  # it calls one, and says nothing else
    at_most_one: bool = False
    restricted: bool = False  # the prompt shows other tools too, which it may not call


FREE = CallRule()


@dataclass(frozen=True, slots=True)
class JsonText:
    """The text is JSON that follows a schema."""

    schema: str = '{"type": "object"}'
    strict: bool = False  # objects have no properties but those that are listed, unless they say so


@dataclass(frozen=True, slots=True)
class RegexText:
    """The whole text matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """The text is one of these."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LarkText:
    """The text follows a grammar in llguidance's dialect of Lark."""

    grammar: str


TextRule = JsonText | RegexText | ChoiceText | LarkText
