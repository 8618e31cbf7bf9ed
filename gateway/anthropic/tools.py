"""Tools that the model may use, and whether it must."""

from __future__ import annotations

from typing import Any, Literal

from penstock.gateway.anthropic.fields import read_at, wrong
from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import CACHED, Body, Policy, Refusal
from penstock.gateway.http.passed_over import pass_over
from penstock.protocol.wire.messages import MAX_TOOLS
from penstock.protocol.wire.values import spelled


class ClientTool(Body):
    """A client's function. There are no built-in tools."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


_TOOL = Policy(
    frozenset(ClientTool.model_fields),
    ignored={
        "cache_control": CACHED,
        "eager_input_streaming": "inputs are streamed as the model writes them",
        "defer_loading": "the model is shown every tool from the start",
    },
    refused={
        "input_examples": Refusal("examples are not shown to the model; put them into the description", ([],)),
        "allowed_callers": Refusal("tools are called by the model alone", (["direct"],)),
    },
)
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def to_tools(values: list[dict[str, Any]]) -> list[Document]:
    """Converts tools to functions.

    Raises:
        ApiError: naming what is wrong.
    """
    if len(values) > MAX_TOOLS:
        raise wrong("tools", f"has {len(values)} tools, the limit is {MAX_TOOLS}")
    return [
        _function(f"tools[{number}]", value) for number, value in enumerate(values) if not _is_search(number, value)
    ]


def _is_search(number: int, value: dict[str, Any]) -> bool:
    """Whether a tool searches for tools, which is left out: the model is shown all of them."""
    is_search = str(value.get("type")).startswith("tool_search_tool_")
    if is_search:
        pass_over(f"tools[{number}].{value['type']}")
    return is_search


def _function(place: str, value: dict[str, Any]) -> Document:
    kind = value.get("type") or "custom"
    if kind != "custom":
        message = f"tools of type {spelled(kind)} are not supported, only custom: the client runs them"
        raise wrong(f"{place}.type", message, "unsupported_value")
    tool = read_at(place, _TOOL, ClientTool, value)
    function = {"name": tool.name, "parameters": tool.input_schema}
    more = {name: getattr(tool, name) for name in ("description", "strict") if name in tool.model_fields_set}
    return {"type": "function", "function": {**function, **more}}


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
