"""Tools that the model may use, and whether it must."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from penstock.gateway.anthropic.client_tools import ClientRunTool, client_run_tool
from penstock.gateway.anthropic.fields import read_at, wrong
from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import CACHED, Body, Policy
from penstock.gateway.common.kinds import leave_out_tool
from penstock.protocol.wire.messages import MAX_TOOLS


class _NamedTool(Body):
    name: str
    strict: bool | None = None
    input_examples: list[dict[str, Any]] = Field(default_factory=list)


class ClientTool(_NamedTool):
    """A client's function."""

    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]


class FixedTool(_NamedTool):
    """A tool of the client's whose input the API fixes."""

    type: str


class MessagesToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


_IGNORED = {
    "cache_control": CACHED,
    "eager_input_streaming": "inputs are streamed as the model writes them",
    "defer_loading": "the model is shown every tool from the start",
    "allowed_callers": "the model calls every tool itself",
}
_TOOL = Policy(frozenset(ClientTool.model_fields), _IGNORED)
_FIXED = Policy(
    frozenset(FixedTool.model_fields), {**_IGNORED, "max_characters": "outputs are given as the client sends them"}
)
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def to_tools(values: list[dict[str, Any]]) -> list[Document]:
    """Converts tools to functions. Those that a server would run, such as a web search, are left out and reported.

    Raises:
        ApiError: naming what is wrong.
    """
    if len(values) > MAX_TOOLS:
        raise wrong("tools", f"has {len(values)} tools, the limit is {MAX_TOOLS}")
    tools = []
    for number, value in enumerate(values):
        place = f"tools[{number}]"
        if (fixed := client_run_tool(value)) is not None:
            tools.append(_of_fixed(place, value, fixed))
        elif (value.get("type") or "custom") == "custom":
            tools.append(_of_custom(place, value))
        else:
            leave_out_tool(place, value["type"], ("custom",))
    return tools


def _of_custom(place: str, value: dict[str, Any]) -> Document:
    tool = read_at(place, _TOOL, ClientTool, value)
    return _function(tool, tool.description, tool.input_schema)


def _of_fixed(place: str, value: dict[str, Any], fixed: ClientRunTool) -> Document:
    return _function(read_at(place, _FIXED, FixedTool, value), fixed.description, fixed.input_schema)


def _function(tool: _NamedTool, description: str | None, schema: Document) -> Document:
    """Returns a function. Templates have no place for examples but its description."""
    if tool.input_examples:
        examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in tool.input_examples)
        description = f"{description or ''}\n\nExamples of inputs:\n{examples}".strip()
    given = {"description": description, "strict": tool.strict}
    more = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, "parameters": schema, **more}}


def to_choice(choice: MessagesToolChoice) -> Document:
    """Returns the fields of the request to the queue.

    Raises:
        ApiError: naming what is wrong.
    """
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", f"goes with the type tool, which needs it, not with {choice.type}")
    named = {"type": "function", "function": {"name": choice.name}}
    mode = named if choice.type == "tool" else _MODES[choice.type]
    return {"tool_choice": mode, "parallel_tool_calls": not choice.disable_parallel_tool_use}
