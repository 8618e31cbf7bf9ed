"""Checks whether two results are of the same model, load and machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.result_file import Result

_MODEL = ("model", "weights", "dtype")
_LOAD = (*(field.name for field in fields(LoadOptions)), "clients")
_MACHINE = ("processor", "cores", "gpus")


def obstacles(first: Result, second: Result) -> Iterator[tuple[str, Any, Any]]:
    """Yields what rules a comparison out: the field, and its value in each result."""
    yield from _differing("title", {"": _what(first)}, {"": _what(second)}, ("",))
    yield from _differing("options", first.options, second.options, _MODEL)
    if not has_same_load(first, second):
        by_option = [*_differing("options", first.options, second.options, _LOAD)]
        yield from by_option or [("load", dict(first.load) or None, dict(second.load) or None)]
    elif first.options.get("clients") != second.options.get("clients"):
        yield from _differing("options", first.options, second.options, ("clients",))
    yield from _differing("machine", first.machine, second.machine, _MACHINE)


def has_same_load(first: Result, second: Result) -> bool:
    """Checks whether both got the same requests at the same times: then equal indexes are a pair."""
    return bool(first.load) and first.load == second.load


def other_differences(first: Result, second: Result) -> list[tuple[str, Any, Any]]:
    """Returns differing versions, and options that are not an obstacle: what may be compared."""
    in_the_way = {name for name, _, _ in obstacles(first, second)}
    names = sorted({*first.options, *second.options})
    differing = _differing("options", first.options, second.options, names)
    options = [each for each in differing if each[0] not in in_the_way]
    versions, others = (result.machine.get("versions") or {} for result in (first, second))
    return [*options, *_differing("versions", versions, others, sorted({*versions, *others}))]


def _what(result: Result) -> str:
    """Returns the title's beginning: an engine by itself, or a service."""
    return result.title.partition(",")[0]


def _differing(
    where: str, first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        if first.get(name) != second.get(name):
            yield (f"{where}.{name}" if name else where, first.get(name), second.get(name))
