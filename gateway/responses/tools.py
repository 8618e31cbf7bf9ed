"""Tools of a response: functions, custom tools, whose input is one text, and namespaces of both.

The queue knows functions only. A custom tool becomes one with a single text, and a tool of a namespace one with a
longer name; the answer's items have them as the client does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import Body, Policy, form_of, read_fields
from penstock.gateway.common.near import nearest
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import is_strict, pass_over
from penstock.protocol.wire.values import spelled

INPUT = "input"
"""The argument of the function that a custom tool becomes."""


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Body):
    """`format` of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Body):
    """Tools with a common beginning of their names."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)


_KINDS: Mapping[str, tuple[type[FunctionTool | CustomTool | NamespaceTool], Policy]] = {
    "function": (FunctionTool, form_of(FunctionTool)),
    "custom": (CustomTool, form_of(CustomTool)),
    "namespace": (NamespaceTool, form_of(NamespaceTool)),
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model is shown it, and as its client knows it."""

    function: Document
    name: str
    namespace: str | None = None
    is_custom: bool = False


def read_tools(values: Sequence[Document], place: str = "tools") -> list[Document]:
    """Returns the tools that the client runs. Those that OpenAI would run, such as web_search, are left out and said.

    Raises:
        ApiError: naming what is wrong.
    """
    tools = []
    for number, value in enumerate(values):
        at = f"{place}[{number}]"
        kind = value.get("type")
        found = _KINDS.get(kind) if isinstance(kind, str) else None
        if found is None:
            _leave_out(at, kind)
            continue
        model, policy = found
        tool = read_fields(policy, model, value, at).model_dump()
        if isinstance(tool.get("tools"), list):
            tool["tools"] = read_tools(tool["tools"], f"{at}.tools")
        if (tool.get("format") or {}).get("syntax") == "lark":
            pass_over(f"{at}.format")  # no grammar holds for a text inside of JSON; the model is shown it
        tools.append(tool)
    return tools


def _leave_out(at: str, kind: object) -> None:
    meant = nearest(kind, _KINDS) if isinstance(kind, str) else None
    if is_strict() or meant is not None or not isinstance(kind, str):
        hint = f", did you mean {meant}?" if meant else f", only {', '.join(_KINDS)}"
        message = f"{at}: a tool of type {spelled(kind)} is not there{hint}"
        raise ApiError(400, message, param=f"{at}.type", code="unsupported_value")
    pass_over(f"{at}.{kind}")


def offered(tools: Sequence[Document], namespace: str | None = None) -> dict[str, OfferedTool]:
    """Returns tools from `read_tools` by the names that the model is shown."""
    found: dict[str, OfferedTool] = {}
    for tool in tools:
        if tool["type"] == "namespace":
            found |= offered(tool["tools"], tool["name"])
            continue
        name = full_name(tool["name"], namespace)
        is_custom = tool["type"] == "custom"
        function = _of_custom(tool) if is_custom else _of_function(tool)
        if name in found:
            raise ApiError(400, f"tools: {name} is there more than once", param="tools", code="invalid_value")
        found[name] = OfferedTool({**function, "name": name}, tool["name"], namespace, is_custom)
    return found


def _of_function(tool: Document) -> Document:
    return {name: value for name, value in tool.items() if name != "type" and value is not None}


def full_name(name: str, namespace: str | None) -> str:
    """Returns a tool's name as the model is shown it."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _of_custom(tool: Document) -> Document:
    """Returns the function of a custom tool. A regular expression holds for its text; a Lark grammar is described."""
    text: Document = {"type": "string"}
    form, description = tool["format"] or {}, tool["description"] or ""
    if form.get("syntax") == "regex":
        text["pattern"] = f"^(?:{form['definition'] or ''})$"
    elif form.get("syntax") == "lark":
        description = f"{description}\n\nThe input follows this Lark grammar:\n{form['definition'] or ''}".strip()
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    described = {"description": description} if description else {}
    return {"name": tool["name"], **described, "parameters": parameters, "strict": "pattern" in text}
