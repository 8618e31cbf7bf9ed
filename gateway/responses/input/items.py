"""Input items of a response, which become messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import CACHED, Policy, read_fields
from penstock.gateway.common.near import nearest
from penstock.gateway.common.turns import spoken
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import pass_over
from penstock.gateway.responses.input.calls import (
    AdditionalToolsItem,
    BuiltinCallItem,
    BuiltinOutputItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
)
from penstock.gateway.responses.input.item import InputItem, content_of, parts_of, turn_of
from penstock.gateway.responses.tools import read_tools
from penstock.protocol.wire.values import spelled

MAX_ITEMS = 4096

_TEXT_OF_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_IGNORED_IN_PARTS: Mapping[str, str] = {
    "annotations": "texts are given as they are",
    "logprobs": "they say nothing to the model",
    "prompt_cache_breakpoint": CACHED,
}
_PARTS: Mapping[str, Policy] = {
    kind: Policy(frozenset({"type", name}), _IGNORED_IN_PARTS, unknown="passed")
    for kind, name in _TEXT_OF_PARTS.items()
}
_IGNORED_IN_ITEMS: Mapping[str, str] = {
    "status": "an item is given as a whole",
    "phase": "templates know no phases of an answer",
    "caller": "functions are called by the model alone",
    "created_by": "it says nothing to the model",
    "encrypted_content": "reasoning is given in plain",
    "environment": "calls are run by the client",
    "max_output_length": "an output is given as it is",
}


class MessageItem(InputItem):
    """A message and its role."""

    prefix: ClassVar[str] = "msg"
    contents: ClassVar[tuple[str, ...]] = ("content",)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[str]

    @model_validator(mode="before")
    @classmethod
    def _may_be_silent(cls, values: object) -> object:
        return spoken(values)

    def shown(self) -> Document:
        if self.role == "assistant":
            content: list[Document] = [
                {"type": "output_text", "text": text, "annotations": []} for text in self.content
            ]
        else:
            content = parts_of("input_text", self.content)
        return {"type": self.type, "role": self.role, "status": "completed", "content": content}

    def add_to(self, messages: list[Document]) -> None:
        if self.role != "assistant":
            messages.append({"role": self.role, "content": content_of(self.content)})
            return
        turn = turn_of(messages, ends_with=("content", "tool_calls"))
        turn["content"] = "".join(self.content)


class ReasoningItem(InputItem):
    """The assistant's reasoning. If it has only another server's encrypted content, it is empty."""

    prefix: ClassVar[str] = "rs"
    contents: ClassVar[tuple[str, ...]] = ("summary", "content")

    type: Literal["reasoning"]
    summary: list[str] = Field(default_factory=list)
    content: list[str] = Field(default_factory=list)

    def shown(self) -> Document:
        summary, content = parts_of("summary_text", self.summary), parts_of("reasoning_text", self.content)
        return {"type": self.type, "status": "completed", "summary": summary, "content": content}

    def add_to(self, messages: list[Document]) -> None:
        text = "".join(self.content) or "\n\n".join(self.summary)
        if text:
            turn = turn_of(messages, ends_with=("reasoning", "content", "tool_calls"))
            turn["reasoning"] = text


_KINDS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    **dict.fromkeys(("local_shell_call", "shell_call", "apply_patch_call"), BuiltinCallItem),
    **dict.fromkeys(("local_shell_call_output", "shell_call_output", "apply_patch_call_output"), BuiltinOutputItem),
    "additional_tools": AdditionalToolsItem,
}
_POLICIES: Mapping[type[InputItem], Policy] = {
    model: Policy(frozenset(model.model_fields), _IGNORED_IN_ITEMS, unknown="passed") for model in _KINDS.values()
}
_SERVER_ENDINGS = ("_call", "_call_output", "_search_output")
_OF_SERVERS = frozenset(
    {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program", "program_output"}
)
"""Items about tools that a server ran. Others have the names of their tools and one of the endings."""


def read_items(value: object) -> list[InputItem]:
    """Reads `input` of a request, or the items in a record.

    Items about tools that a server ran are left out and reported.

    Raises:
        ApiError: naming what is wrong.
    """
    if isinstance(value, str):
        return [MessageItem.model_validate({"role": "user", "content": [value]})]
    if not isinstance(value, list):
        raise ApiError(400, "input: must be a text or a list of items", param="input", code="invalid_type")
    if len(value) > MAX_ITEMS:
        raise ApiError(400, f"input: has {len(value)} items, the limit is {MAX_ITEMS}", param="input")
    read = (_read_item(f"input[{place}]", item) for place, item in enumerate(value))
    return [item for item in read if item is not None]


def _read_item(place: str, value: object) -> InputItem | None:
    if not isinstance(value, dict):
        raise ApiError(400, f"{place}: must be an object", param=place, code="invalid_type")
    kind = value.get("type") or "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        if _is_of_server(kind):
            pass_over(f"{place}.{kind}")
            return None
        message = f"{place}: items of type {spelled(kind)} are not supported, only {', '.join(_KINDS)}"
        raise ApiError(400, message, param=f"{place}.type", code="unsupported_value")
    texts = {name: _texts(value[name], f"{place}.{name}") for name in model.contents if name in value}
    item = read_fields(_POLICIES[model], model, value | texts, place)
    if isinstance(item, AdditionalToolsItem):
        return item.model_copy(update={"tools": read_tools(item.tools, f"{place}.tools")})
    return item


def _is_of_server(kind: object) -> bool:
    if not isinstance(kind, str) or nearest(kind, _KINDS):
        return False
    return kind in _OF_SERVERS or kind.endswith(_SERVER_ENDINGS)


def _texts(value: object, place: str) -> object:
    """Returns a content as the texts of its parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return value
    return [_text(part, f"{place}[{number}]") for number, part in enumerate(value)]


def _text(part: object, place: str) -> object:
    if not isinstance(part, dict):
        raise ApiError(400, f"{place}: must be an object", param=place, code="invalid_type")
    kind = part.get("type")
    name = _TEXT_OF_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(kind, str):
        message = f"{place}: a part of type {spelled(kind)} is not supported, only text"
        raise ApiError(400, message, param=f"{place}.type", code="unsupported_value")
    return _PARTS[kind].honoured_of(part, place).get(name)


def additional_tools(items: Iterable[InputItem]) -> list[Document]:
    """Returns the tools that items add to those of the body."""
    return [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]


def shown_items(items: Iterable[InputItem], request_id: str) -> list[Document]:
    """Returns items in the form in which they are stored. An item without an id gets one from its place."""
    return [
        {"id": item.id or f"{item.prefix}_{request_id}_in{place}", **item.shown()} for place, item in enumerate(items)
    ]


def to_messages(items: Iterable[InputItem]) -> list[Document]:
    """Converts items to messages. Consecutive reasoning, text and calls are one turn of the assistant: one message."""
    messages: list[Document] = []
    for item in items:
        item.add_to(messages)
    return messages
