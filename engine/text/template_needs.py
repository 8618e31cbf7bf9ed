"""Finds out by trial what input a chat template needs: templates do not say.

Four things differ between families. The arguments of a tool call are a mapping to most templates and JSON text to some.
Ids of tool calls are nine letters and digits to Mistral's templates, which refuse others. A message with only calls has
no content to most, and an empty one to DeepSeek's. Content is text to most, a list of parts to some, and either to
others, which may depend on the role.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.chat_template import RenderingEnded

Message: TypeAlias = Mapping[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LONG_ID = "call_0123456789abcdef01234567"
_WORDS = ("penstock-a", "penstock-b")
_AS_DATA = re.compile(rf"""['"]text['"]: *['"]{_WORDS[0]}""")  # parts printed as data instead of being read
_ARGUMENTS = {"penstock": "probe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"penstock": {"type": "string", "description": "A word."}}},
    },
}
_QUESTION = {"role": "user", "content": "Hi."}
_CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": _LONG_ID, "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}},
    ],
}
_RESULT = {"role": "tool", "content": "1", "name": "probe", "tool_call_id": _LONG_ID}


@dataclass(frozen=True, slots=True)
class CallShape:
    """The form of messages with tool calls that a template needs."""

    has_short_ids: bool = False
    has_text_arguments: bool = False
    has_content: bool = False


_SHAPES = [CallShape(*wants) for wants in itertools.product((False, True), repeat=3)]


class TemplateNeeds:
    """What one template needs; each fact is found out on first use, by rendering small conversations.

    It is the same on every worker. If a rendering takes too long, nothing is learnt, and the request that needed it is
    refused.

    Args:
        render: renders messages and tools; raises InvalidRequest if the template does not accept them.
    """

    def __init__(self, render: Callable[[Sequence[Message], Sequence[Message]], str]) -> None:
        self._render = render
        self._reads_parts: dict[str, bool] = {}
        self._reads_text: dict[str, bool] = {}

    @cached_property
    def calls(self) -> CallShape:
        """The first shape that the template accepts, or the plain one if it accepts none."""
        return next((shape for shape in _SHAPES if self._takes(shape)), _SHAPES[0])

    def reads_text(self, role: str) -> bool:
        """Whether content of this role may be text."""
        if role not in self._reads_text:
            self._reads_text[role] = self._shows(role, _WORDS[0], _WORDS[:1]) or not self.reads_parts(role)
        return self._reads_text[role]

    def reads_parts(self, role: str) -> bool:
        """Whether content of this role may be a list of parts."""
        if role not in self._reads_parts:
            parts = [{"type": "text", "text": word} for word in _WORDS]
            self._reads_parts[role] = self._shows(role, parts, _WORDS)
        return self._reads_parts[role]

    def _takes(self, shape: CallShape) -> bool:
        messages = [with_calls(message, shape) for message in (_QUESTION, _CALL, _RESULT)]
        text = self._try(messages, [_TOOL])
        return text is not None and repr(_ARGUMENTS) not in text

    def _shows(self, role: str, content: object, words: Sequence[str]) -> bool:
        text = self._try(self._conversation(role, content), [])
        return text is not None and all(word in text for word in words) and _AS_DATA.search(text) is None

    def _conversation(self, role: str, content: object) -> list[Message]:
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        if role == "assistant":
            return [_QUESTION, message, _QUESTION]
        if role == "tool":
            return [with_calls(known, self.calls) for known in (_QUESTION, _CALL, {**_RESULT, **message})]
        return [message, _QUESTION]

    def _try(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, tools)
        except RenderingEnded:
            raise
        except InvalidRequest:
            return None


def shaped(messages: Sequence[Message], needs: TemplateNeeds) -> list[dict[str, Any]]:
    """Returns the messages in the form that the template needs, without null fields."""
    made = [_with_content(message, needs) for message in messages]
    if any("tool_calls" in message or "tool_call_id" in message for message in made):
        made = [with_calls(message, needs.calls) for message in made]
    return made


def with_calls(message: Message, shape: CallShape) -> dict[str, Any]:
    """Returns the message with its calls, or the id of the call that it answers, in this shape."""
    made = dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, shape) for call in made["tool_calls"]]
        if shape.has_content:
            made.setdefault("content", "")
    if "tool_call_id" in made and shape.has_short_ids:
        made["tool_call_id"] = short_id(made["tool_call_id"])
    return made


def short_id(call_id: str) -> str:
    """Returns nine letters and digits that stand for this id: the id itself if it has that form."""
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
    made = {name: value for name, value in message.items() if value is not None}
    content, role = made.get("content"), made["role"]
    if isinstance(content, str):
        if not needs.reads_text(role):
            made["content"] = [{"type": "text", "text": content}]
    elif content is not None and not needs.reads_parts(role):
        made["content"] = "\n".join(part["text"] for part in content)
    return made
