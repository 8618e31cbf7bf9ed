"""Values for each parameter of a request: one that it takes, and those beside its range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.parameters import INT64, Parameter
from penstock.protocol.wire import PARAMETERS

_FUNCTION = {"type": "function", "function": {"name": "noon"}}
_OF_FORM: Mapping[str, Any] = {
    "tools": [_FUNCTION],
    "tool_choice": "none",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "vendor=value",
}
_OF_TYPE: Mapping[Any, Any] = {
    str: "x",
    Sequence[int]: [3],
    Sequence[str]: ["x"],
    str | Sequence[str]: ["x"],
    Mapping[int, float]: {"3": 1.5},
    Mapping[str, Any]: {"style": "terse"},
}


def a_value(name: str) -> Any:
    """Returns a value as JSON has it: in range, and neither the default nor what the engine takes for neutral."""
    each = PARAMETERS[name]
    if name in _OF_FORM or each.type in _OF_TYPE:
        return _OF_FORM[name] if name in _OF_FORM else _OF_TYPE[each.type]
    if each.type is bool:
        return not each.default
    least = each.above or each.least or 0
    return least + 0.75 * ((each.most or 0) - least) if each.type is float else least + 1


def the_edges(each: Parameter) -> list[float]:
    """Returns the outermost values that are in range."""
    return [edge for edge in (each.least, each.most) if edge is not None]


def beyond(each: Parameter) -> list[float]:
    """Returns values that are just out of range."""
    step = 1e-6 if each.type is float else 1
    found = [] if each.least is None else [each.least - step]
    found += [] if each.above is None else [each.above]
    found += [] if each.most is None else [each.most + (1 if each.most == INT64 else step)]
    return [*found, math.nan] if each.type is float and found else found
