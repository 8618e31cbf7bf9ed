"""Writes into docs/wire.md the table of request parameters: `python -m docs.scripts.parameters_table`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from docs.scripts.pages import ROOT
from penstock.parameters import FIRST, Parameter
from penstock.protocol.wire import PARAMETERS

PAGE = ROOT / "docs" / "wire.md"
_PLACE = re.compile(r"(<!-- Written by `make docs`[^>]*-->\n).*(<!-- Up to here\. -->)", re.DOTALL)
_HEAD = "| parameter | values | default | HTTP | meaning |\n| --- | --- | --- | --- | --- |"
_WORDS: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    int | bool: "integer",
    float: "number",
    str: "text",
    Sequence[int]: "list of integers from 0",
    Sequence[str]: "list of non-empty texts, or one",
    str | Sequence[str]: "list of non-empty texts, or one",
    Mapping[int, float]: "map of token id to number",
}


def page(text: str) -> str:
    """Returns the page with the table as it must be."""
    rows = "\n".join(_row(name, each) for name, each in PARAMETERS.items())
    written, count = _PLACE.subn(lambda found: f"{found[1]}\n{_HEAD}\n{rows}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"{PAGE.name} has no place for the table")
    return written


def _row(name: str, parameter: Parameter) -> str:
    values = parameter.values or ", ".join(filter(None, (_WORDS.get(parameter.type, "object"), parameter.range)))
    apis = ", ".join(taker for taker in parameter.takers if taker != "send")
    return f"| `{name}` | {values} | {_default(parameter)} | {apis} | {meaning(parameter)} |"


def _default(parameter: Parameter) -> str:
    if parameter.default in (None, ()):
        return parameter.otherwise
    return f"{parameter.default:g}" if isinstance(parameter.default, float) else str(parameter.default).lower()


def meaning(parameter: Parameter) -> str:
    """Returns what the table says of a parameter."""
    since = "" if parameter.since == FIRST else f"Since {parameter.since}."
    return " ".join(filter(None, (parameter.text, parameter.more, since)))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
