"""Tools of a response: functions, custom tools, whose input is one text, built-in ones, and namespaces.

The queue knows functions only. A custom tool becomes one with a single text, a built-in tool one with fixed parameters,
and a tool of a namespace one with a longer name; the answer's items have them as the client does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import Body, Policy, form_of, read_fields
from penstock.gateway.common.kinds import leave_out_tool
from penstock.gateway.common.schemas import closed_object
from penstock.gateway.common.turns import CUSTOM_INPUT
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import pass_over
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS, BuiltinName
from penstock.gateway.responses.grammars import regex_of


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


class ToolEnvironment(Body):
    """`environment` of the tool `shell`. Containers are OpenAI's."""

    type: Literal["local"]


class BuiltinToolBody(Body):
    """A tool of `BUILTIN_TOOLS`."""

    type: BuiltinName
    environment: ToolEnvironment | None = None


_MODELS: Mapping[str, type[Body]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    **dict.fromkeys(BUILTIN_TOOLS, BuiltinToolBody),
}
_KINDS: Mapping[str, tuple[type[Body], Policy]] = {kind: (model, form_of(model)) for kind, model in _MODELS.items()}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model is shown it, and as its client knows it."""

    function: Document
    name: str
    namespace: str | None = None
    kind: str = "function"  # `custom` or a built-in one's name


def read_tools(values: Sequence[Document], place: str = "tools") -> list[Document]:
    """Returns the tools that the client runs.

    Those that OpenAI would run, such as web_search, are left out and reported.

    Raises:
        ApiError: naming what is wrong.
    """
    tools = []
    for number, value in enumerate(values):
        at = f"{place}[{number}]"
        kind = value.get("type")
        found = _KINDS.get(kind) if isinstance(kind, str) else None
        if found is None or _is_in_container(value):
            leave_out_tool(at, kind, _KINDS)
            continue
        model, policy = found
        tool = read_fields(policy, model, value, at).model_dump()
        if isinstance(tool.get("tools"), list):
            tool["tools"] = read_tools(tool["tools"], f"{at}.tools")
        if kind == "custom" and _grammar_of(tool) and _pattern_of(tool) is None:
            pass_over(f"{at}.format")  # it has no regular expression; the model is shown it
        tools.append(tool)
    return tools


def _is_in_container(tool: Document) -> bool:
    where = tool.get("environment")
    return isinstance(where, dict) and str(where.get("type")).startswith("container_")


def offered(tools: Sequence[Document], namespace: str | None = None) -> dict[str, OfferedTool]:
    """Returns tools from `read_tools` by the names that the model is shown."""
    found: dict[str, OfferedTool] = {}
    for tool in tools:
        if tool["type"] == "namespace":
            found |= offered(tool["tools"], tool["name"])
            continue
        own_name = tool.get("name") or tool["type"]
        name = full_name(own_name, namespace)
        if name in found:
            raise ApiError(400, f"tools: {name} is given more than once", param="tools", code="invalid_value")
        found[name] = OfferedTool({**_function_of(tool), "name": name}, own_name, namespace, tool["type"])
    return found


def _function_of(tool: Document) -> Document:
    builtin = BUILTIN_TOOLS.get(tool["type"])
    if builtin is not None:
        return builtin.function(tool["type"])
    return _of_custom(tool) if tool["type"] == "custom" else _of_function(tool)


def _of_function(tool: Document) -> Document:
    return {name: value for name, value in tool.items() if name != "type" and value is not None}


def full_name(name: str, namespace: str | None) -> str:
    """Returns a tool's name as the model is shown it."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _of_custom(tool: Document) -> Document:
    """Returns the function of a custom tool. Its text is held to its grammar, if that has a regular expression."""
    text: Document = {"type": "string"}
    description, grammar = tool["description"] or "", _grammar_of(tool)
    if grammar:
        description = f"{description}\n\nThe input follows this Lark grammar:\n{grammar}".strip()
    if (pattern := _pattern_of(tool)) is not None:
        text["pattern"] = f"^(?:{pattern})$"
    parameters = closed_object({CUSTOM_INPUT: text}, [CUSTOM_INPUT])
    said = {"description": description} if description else {}
    return {"name": tool["name"], **said, "parameters": parameters, "strict": "pattern" in text}


def _grammar_of(tool: Document) -> str | None:
    """Returns a custom tool's Lark grammar."""
    form = tool["format"] or {}
    return form["definition"] or "" if form.get("syntax") == "lark" else None


def _pattern_of(tool: Document) -> str | None:
    """Returns the regular expression that a custom tool's text follows."""
    form = tool["format"] or {}
    if form.get("syntax") == "regex":
        return form["definition"] or ""
    grammar = _grammar_of(tool)
    return None if grammar is None else regex_of(grammar)
