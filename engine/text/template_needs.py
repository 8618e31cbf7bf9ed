"""What a chat template wants its input to look like, found out by trying: templates do not say.

Three things differ between families. The arguments of a tool call are a mapping to most templates and JSON text to
some. Ids of tool calls are nine letters and digits to Mistral's, which refuse others. Content is text to most, a list
of parts to some, and to others either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from penstock.engine.errors import InvalidRequest

Message: TypeAlias = Mapping[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LONG_ID = "call_0123456789abcdef01234567"
_WORDS = ("penstock-a", "penstock-b")
_ARGUMENTS = {"penstock": "probe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"penstock": {"type": "string", "description": "A word."}}},
    },
}


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a template wants tool calls to look like."""

    has_text_arguments: bool = False
    has_short_ids: bool = False


_SHAPES = [CallShape(text, short) for short in (False, True) for text in (False, True)]


class TemplateNeeds:
    """Of one template; each is found out when it first matters, by rendering small conversations.

    Args:
        render: of messages and tools. It raises InvalidRequest where the template does not take them.
    """

    def __init__(self, render: Callable[[Sequence[Message], Sequence[Message]], str]) -> None:
        self._render = render

    @cached_property
    def calls(self) -> CallShape:
        """The first shape that the template takes; the plain one where it takes none."""
        return next((shape for shape in _SHAPES if self._takes(shape)), _SHAPES[0])

    @cached_property
    def reads_text(self) -> bool:
        """Whether content may be text."""
        return self._shows(_WORDS[0], _WORDS[:1]) or not self.reads_parts

    @cached_property
    def reads_parts(self) -> bool:
        """Whether content may be a list of parts."""
        return self._shows([{"type": "text", "text": word} for word in _WORDS], _WORDS)

    def _takes(self, shape: CallShape) -> bool:
        call = {
            "id": _LONG_ID,
            "type": "function",
            "function": {"name": "probe", "arguments": _ARGUMENTS},
        }
        messages: list[Message] = [
            {"role": "user", "content": _WORDS[0]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _WORDS[1], "name": "probe", "tool_call_id": _LONG_ID},
        ]
        text = self._try([with_calls(message, shape) for message in messages], [_TOOL])
        return text is not None and repr(_ARGUMENTS) not in text

    def _shows(self, content: object, words: Sequence[str]) -> bool:
        text = self._try([{"role": "user", "content": content}], [])
        return text is not None and all(word in text for word in words) and "'type'" not in text

    def _try(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, tools)
        except InvalidRequest:
            return None


def shaped(messages: Sequence[Message], needs: TemplateNeeds) -> list[dict[str, Any]]:
    """The messages as the template wants them."""
    made = [_with_content(message, needs) for message in messages]
    if any("tool_calls" in message or "tool_call_id" in message for message in messages):
        made = [with_calls(message, needs.calls) for message in made]
    return made


def with_calls(message: Message, shape: CallShape) -> dict[str, Any]:
    """The message with its calls, or the id of the call that it answers, in this shape."""
    made = dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, shape) for call in made["tool_calls"]]
    if "tool_call_id" in made and shape.has_short_ids:
        made["tool_call_id"] = short_id(made["tool_call_id"])
    return made


def short_id(call_id: str) -> str:
    """Nine letters and digits that stand for this id: itself, if it is such."""
    return call_id if _SHORT_ID.fullmatch(call_id) else blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _call(call: Message, shape: CallShape) -> dict[str, Any]:
    made = dict(call)
    if shape.has_short_ids and "id" in made:
        made["id"] = short_id(made["id"])
    if shape.has_text_arguments:
        function = made["function"]
        made["function"] = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return made


def _with_content(message: Message, needs: TemplateNeeds) -> dict[str, Any]:
    made, content = dict(message), message.get("content")
    if isinstance(content, str):
        if not needs.reads_text:
            made["content"] = [{"type": "text", "text": content}]
    elif content is not None and not needs.reads_parts:
        made["content"] = "\n".join(part["text"] for part in content)
    return made
