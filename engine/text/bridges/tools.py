"""Brings tools into the prompt: by the name that a template reads, and with the keys that it cannot do without."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from penstock.engine.text.bridges.probe import FUNCTION, TOOL, Message
from penstock.engine.text.chat_template import accepted

RenderRaw: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], str]

_NAMES_TOOLS = re.compile("tool|func|plugin", re.IGNORECASE)
_KEYS = re.compile(r"""(?:\.|\[['"]|get\(['"])(\w*(?:tool|function)s\w*)""")  # of messages
_NOT_TOOLS = {"tools", "tool_calls"}
_LEAD = {"role": "system", "content": "You are a helpful assistant."}
_CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Hi."},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}),
)


@dataclass(frozen=True, slots=True)
class ToolPlace:
    """Where a template takes tools from."""

    name: str = "tools"  # of a variable, or of a key of the system message in front
    is_key: bool = False
    is_text: bool = False  # as JSON
    needs_system: bool = False  # only beside a system message

    @property
    def is_usual(self) -> bool:
        return self == ToolPlace()

    def put(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Any]]:
        """Returns the messages and variables with which the template shows the tools."""
        variables: dict[str, Any] = {"tools": list(tools)}
        if self.needs_system and messages[0]["role"] != "system":
            messages = [_LEAD, *messages]
        given = json.dumps(tools, ensure_ascii=False) if self.is_text else list(tools)
        if self.is_key:
            return [{**messages[0], self.name: given}, *messages[1:]], variables
        return messages, {**variables, self.name: given}


class Tools:
    """How one template takes tools.

    Args:
        render: renders messages with variables; raises InvalidRequest if the template does not accept them.
        source: the template's source.
        variables: returns the names of the template's variables.
    """

    def __init__(self, render: RenderRaw, source: str, variables: Callable[[], Iterable[str]]) -> None:
        self._render = render
        self._source = source
        self._variables = variables

    @cached_property
    def place(self) -> ToolPlace | None:
        """Where tools go; None: the template shows none."""
        return next((place for place in self._places() if self._shows(place, TOOL)), None)

    @cached_property
    def lacks(self) -> tuple[str, ...]:
        """The keys that a tool must have, in the order in which they are filled in."""
        place = self.place
        if place is None:
            return ()
        return tuple(name for name, lack in LACKS.items() if not self._shows(place, lack.without(TOOL)))

    def put(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """Returns the messages and variables with which the template shows the tools, if it can."""
        if not tools or (self.place is None and not self._takes({"tools": [TOOL]})):
            return messages, self._without
        return (self.place or ToolPlace()).put(messages, [self._filled(tool) for tool in tools])

    @cached_property
    def _without(self) -> Mapping[str, Any]:
        """The variables of a conversation without tools: nothing, unless the template then fails for a question."""
        nothing: Mapping[str, Any] = {"tools": None}
        empties: list[Any] = [[], ""]
        by_name = [{**nothing, name: empty} for name in self._names for empty in empties]
        return next((none for none in (nothing, {"tools": []}, *by_name) if self._takes(none)), nothing)

    @cached_property
    def _names(self) -> list[str]:
        """The variables that may be tools."""
        return sorted(set(filter(_NAMES_TOOLS.search, self._variables())) - _NOT_TOOLS)

    def _filled(self, tool: Message) -> Message:
        made = copy.deepcopy(dict(tool)) if self.lacks else tool
        for name in self.lacks:
            LACKS[name].fill(made["function"])
        return made

    def _places(self) -> Iterator[ToolPlace]:
        yield ToolPlace()
        yield ToolPlace(needs_system=True)
        for name in self._names:
            yield from (ToolPlace(name, is_text=is_text) for is_text in (False, True))
        for name in sorted(set(_KEYS.findall(self._source)) - {"tool_calls"}):
            yield from (ToolPlace(name, is_key=True, is_text=is_text, needs_system=True) for is_text in (False, True))

    def _shows(self, place: ToolPlace, tool: Message) -> bool:
        texts = (self._text(*place.put(messages, [tool])) for messages in _CONVERSATIONS)
        return all(text is not None and FUNCTION in text for text in texts)

    def _takes(self, variables: Mapping[str, Any]) -> bool:
        return self._text(_CONVERSATIONS[0], variables) is not None

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
        return accepted(lambda: self._render(messages, variables))


@dataclass(frozen=True, slots=True)
class Lack:
    """A key that tools may lack and some templates need."""

    drop: Callable[[dict[str, Any]], object]  # from a function
    fill: Callable[[dict[str, Any]], object]

    def without(self, tool: Message) -> Message:
        made = copy.deepcopy(dict(tool))
        self.drop(made["function"])
        return made


def _fill_parameters(function: dict[str, Any]) -> None:
    if not function.get("parameters"):
        function["parameters"] = {"type": "object", "properties": {}}


def _schemas(function: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas of a function's parameters, those within others too."""
    waiting = [function.get("parameters")]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            yield schema
            within = schema.get("properties")
            waiting += [*(within.values() if isinstance(within, dict) else ()), schema.get("items")]


def _set(name: str, value: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Returns a function that sets a key of each schema below the parameters that lacks it."""

    def fill(function: dict[str, Any]) -> None:
        for schema in list(_schemas(function))[1:]:
            if schema.get(name) is None:
                schema[name] = value(schema)

    return fill


def _type_of(schema: Mapping[str, Any]) -> str:
    """Returns the type of a schema that names none."""
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key) or ()]
    named = (branch.get("type") for branch in branches if isinstance(branch, Mapping))
    return next((type_ for type_ in named if isinstance(type_, str) and type_ != "null"), "string")


def _single_types(function: dict[str, Any]) -> None:
    for schema in _schemas(function):
        if isinstance(types := schema.get("type"), list):
            schema["type"] = next((type_ for type_ in types if type_ != "null"), "null")


def _in_word(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Returns a function that changes the schema of the probe's one parameter."""
    return lambda function: change(function["parameters"]["properties"]["penstock"])


LACKS: Mapping[str, Lack] = {
    "description": Lack(
        lambda function: function.pop("description"),
        lambda function: function.update(description=function.get("description") or function["name"]),
    ),
    "parameters": Lack(lambda function: function.pop("parameters"), _fill_parameters),
    "properties": Lack(
        lambda function: function.update(parameters={"type": "object"}),
        lambda function: function.get("parameters", {}).setdefault("properties", {}),
    ),
    "required": Lack(
        lambda function: function["parameters"].pop("required"),
        lambda function: function.get("parameters", {}).setdefault("required", []),
    ),
    "types of parameters": Lack(_in_word(lambda schema: schema.pop("type")), _set("type", _type_of)),
    "single types": Lack(_in_word(lambda schema: schema.update(type=["string", "null"])), _single_types),
    "descriptions of parameters": Lack(
        _in_word(lambda schema: schema.pop("description")), _set("description", lambda schema: "")
    ),
}
"""What tools may lack, by name; `Tools.lacks` names those that a template needs."""
