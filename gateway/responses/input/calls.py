"""Input items about tools: calls that the assistant made, and what came of them."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.gateway.common.documents import Document
from penstock.gateway.common.turns import custom_arguments
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS
from penstock.gateway.responses.input.item import InputItem, content_of, parts_of, turn_of
from penstock.gateway.responses.tools import full_name


class _NamedCallItem(InputItem):
    """A call of a tool that the client named, by the assistant."""

    def shown(self) -> Document:
        return {**self.model_dump(exclude={"id"}, exclude_none=True), "status": "completed"}


class FunctionCallItem(_NamedCallItem):
    """A function call by the assistant."""

    prefix: ClassVar[str] = "fc"

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"

    def add_to(self, messages: list[Document]) -> None:
        _add_call(messages, self.call_id, full_name(self.name, self.namespace), self.arguments)


class CustomCallItem(_NamedCallItem):
    """A call of a custom tool by the assistant."""

    prefix: ClassVar[str] = "ctc"

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def add_to(self, messages: list[Document]) -> None:
        _add_call(messages, self.call_id, full_name(self.name, self.namespace), custom_arguments(self.input))


class CallOutputItem(InputItem):
    """The output of a function, or of a custom tool."""

    prefix: ClassVar[str] = "fco"
    contents: ClassVar[tuple[str, ...]] = ("output",)

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: list[str] = Field(default_factory=list)

    def shown(self) -> Document:
        output = self.output[0] if len(self.output) == 1 else parts_of("input_text", self.output)
        return {"type": self.type, "call_id": self.call_id, "output": output, "status": "completed"}

    def add_to(self, messages: list[Document]) -> None:
        messages.append({"role": "tool", "content": content_of(self.output), "tool_call_id": self.call_id})


class BuiltinCallItem(InputItem):
    """A call of a built-in tool by the assistant. Older programs know it by its `id` alone."""

    prefix: ClassVar[str] = "btc"

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str | None = None
    action: dict[str, Any] = Field(default_factory=dict)
    operation: dict[str, Any] = Field(default_factory=dict)

    @property
    def _name(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def _arguments(self) -> Document:
        tool = BUILTIN_TOOLS[self._name]
        return tool.arguments(getattr(self, tool.holder))

    def shown(self) -> Document:
        tool = BUILTIN_TOOLS[self._name]
        return {
            "type": self.type, "call_id": _call_id(self), tool.holder: tool.held(self._arguments),
            "status": "completed",
        }  # fmt: skip

    def add_to(self, messages: list[Document]) -> None:
        _add_call(messages, _call_id(self), self._name, json.dumps(self._arguments, ensure_ascii=False))


class BuiltinOutputItem(InputItem):
    """The output of a built-in tool: a text, or what several commands printed."""

    prefix: ClassVar[str] = "bto"

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    output: str | list[Any] | None = None
    status: str | None = None

    def shown(self) -> Document:
        given = self.model_dump(include={"type", "output", "status"}, exclude_none=True)
        return {**given, "call_id": _call_id(self)}

    def add_to(self, messages: list[Document]) -> None:
        output = self.output if isinstance(self.output, str) else json.dumps(self.output, ensure_ascii=False)
        said = output if self.output else self.status or ""
        content = f"failed\n{output}" if self.output and self.status == "failed" else said
        messages.append({"role": "tool", "content": content, "tool_call_id": _call_id(self)})


class AdditionalToolsItem(InputItem):
    """Tools that a program adds to those of the body. They hold for the whole request."""

    prefix: ClassVar[str] = "at"

    type: Literal["additional_tools"]
    role: str = "developer"
    tools: list[dict[str, Any]]

    def shown(self) -> Document:
        return {"type": self.type, "role": self.role, "tools": self.tools}

    def add_to(self, messages: list[Document]) -> None:
        """The model is shown tools in front of all messages."""


def _add_call(messages: list[Document], call_id: str, name: str, arguments: str) -> None:
    calls = turn_of(messages, ends_with=()).setdefault("tool_calls", [])
    calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _call_id(item: BuiltinCallItem | BuiltinOutputItem) -> str:
    return item.call_id or item.id or ""
