"""Finds out what a chat template shows, by rendering small conversations in which each content is a word of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.engine.text.chat_template import accepted

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], Sequence[Message]], str]

FUNCTION = "penstock_probe"
_CALLED = "penstock_called"
TOOL: Message = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"penstock": {"type": "string", "description": "A word."}},
            "required": ["penstock"],
        },
    },
}


def kind_of(message: Message) -> str:
    """Returns the role, or `call` for an assistant's message with tool calls."""
    return "call" if message.get("tool_calls") else str(message["role"])


class Probe:
    """Renders small conversations, each once. They are named by the kinds of their messages, as `kind_of` has them.

    Args:
        render: renders messages and tools; raises InvalidRequest if the template does not accept them.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._shown: dict[tuple[tuple[str, ...], bool], frozenset[str] | None] = {}

    def shows(self, *kinds: str, tools: bool = False) -> bool:
        """Checks that a conversation is accepted, and shown with every content, and with the tools if they can be."""
        shown = self.shown(kinds, tools=tools)
        return shown is not None and shown >= {*_words(kinds), *self._tool(tools=tools)}

    def keeps(self, before: Sequence[str], inserted: Sequence[str], after: Sequence[str], *, tools: bool) -> bool:
        """Checks that inserted messages are shown, and hide nothing that is shown without them."""
        shown = self.shown((*before, *inserted, *after), tools=tools)
        if shown is None:
            return False
        words = list(_words((*before, *inserted, *after)))
        own = words[len(before) : len(before) + len(inserted)]
        others = words[: len(before)] + words[len(before) + len(inserted) :]
        without = self.shown((*before, *after), tools=tools) or frozenset()
        kept = {word for word, alone in zip(others, _words((*before, *after)), strict=True) if alone in without}
        return shown >= {*own, *kept, *self._tool(tools=tools)}

    def _tool(self, *, tools: bool) -> frozenset[str]:
        """Returns the tool's name if there are tools and a question shows them."""
        return (self.shown(("user",), tools=True) or frozenset()) & {FUNCTION} if tools else frozenset()

    def shown(self, kinds: Sequence[str], *, tools: bool) -> frozenset[str] | None:
        """Returns the words that are shown of a conversation, and the tool's name if there are tools; None: it is
        refused.
        """
        if not kinds:
            return None
        key = (tuple(kinds), tools)
        if key not in self._shown:
            text = self.text(conversation(kinds), [TOOL] if tools else [])
            looked_for = {*_words(kinds), *([FUNCTION] if tools else [])}
            self._shown[key] = None if text is None else frozenset(word for word in looked_for if word in text)
        return self._shown[key]

    def text(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str | None:
        """Renders; None: the template does not accept it."""
        return accepted(lambda: self._render(messages, tools))


def conversation(kinds: Iterable[str]) -> list[dict[str, Any]]:
    """Returns messages of these kinds; the content of each is its word."""
    made: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for index, kind in enumerate(kinds):
        if kind == "call":
            open_calls.append(f"call_{index:012}{0:012}")
            made.append({"role": "assistant", "tool_calls": [_call(open_calls[-1], _word(index))]})
        elif kind == "tool":
            call_id = open_calls.pop(0) if open_calls else f"call_{index:024}"
            made.append({"role": "tool", "content": _word(index), "name": _CALLED, "tool_call_id": call_id})
        else:
            made.append({"role": kind, "content": _word(index)})
    return made


def _call(call_id: str, word: str) -> dict[str, Any]:
    arguments = {"penstock": word + call_id[-1]}
    return {"id": call_id, "type": "function", "function": {"name": _CALLED, "arguments": arguments}}


def _words(kinds: Iterable[str]) -> Iterable[str]:
    return (_word(index) for index, _ in enumerate(kinds))


def _word(index: int) -> str:
    return f"penstock-{index}-word"
