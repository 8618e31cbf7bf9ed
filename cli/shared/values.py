"""Checks that hold for every value on a command line, whatever its command and option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.worker.settings_loading import LONGEST_S, SettingsError

MOST_INT = 2**53
"""Redis's scripts, and JSON readers, count exactly up to this."""

_OF_ANY_TEXT = frozenset({"chat", "map", "send"})
"""Commands whose options a model reads, line breaks included. `GenerateRequest` checks them."""


_METAVARS: dict[Any, str] = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
"""How help spells the type of a value, as it does for settings."""


def strict(command: Any) -> Any:
    """Makes a tree of commands spell types alike, and refuse values that no option can mean before a command sees them.

    Such a refusal is a `SettingsError`: one line, with the option and the value.
    """
    for each in _leaves(command):
        for parameter in each.params:
            parameter.metavar = parameter.metavar or _METAVARS.get(_type_of(parameter))
        each.callback = _checked(each, each.callback)
    return command


def _type_of(parameter: Any) -> Any:
    return getattr(getattr(parameter, "type_descriptor", None), "annotation", None)


def _leaves(command: Any) -> Iterator[Any]:
    below: Mapping[str, Any] | None = getattr(command, "commands", None)
    if below is None:
        yield command
    else:
        for each in below.values():
            yield from _leaves(each)


def _checked(command: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    spellings = {each.name: _spelling(each) for each in command.params}

    def checked(**given: Any) -> Any:
        for name, value in given.items():
            for each in value if isinstance(value, list | tuple) else [value]:
                problem = _problem(each, may_be_any_text=command.name in _OF_ANY_TEXT)
                if problem is not None:
                    shown = "" if name.endswith("redis_url") else f", not {str(each)!r}"
                    raise SettingsError(f"{spellings[name]}: {problem}{shown}")
        return run(**given)

    return checked


def _spelling(parameter: Any) -> str:
    """Returns an option as it is given, or an argument as `--help` names it."""
    first: str = parameter.opts[0]
    return first if first.startswith("-") else parameter.metavar or first


def _problem(value: object, *, may_be_any_text: bool) -> str | None:
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= LONGEST_S):
        return f"must be a number up to {LONGEST_S:g}"
    if isinstance(value, int) and abs(value) > MOST_INT:
        return f"must be a number up to {MOST_INT}"
    if isinstance(value, str) and not may_be_any_text and not value.strip().isprintable():
        return "must be without control characters, such as line breaks"
    return None
