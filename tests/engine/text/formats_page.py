"""Writes into docs/chat.md which formats there are, and what is read of each family's template: `make docs`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.engine.text.bridges.round_trip import Ability
from penstock.engine.text.response.choice import shows_reasoning
from penstock.engine.text.response.formats import FORMATS
from tests.engine.text.reply_texts import Message, write
from tests.engine.text.templates_for_tests import TEMPLATES, family_of, readback_of
from tests.support.packages import ROOT

DOCS = ROOT / "docs" / "chat.md"
PLACE = re.compile(r"(<!-- Written by `make docs`[^>]*-->\n).*(<!-- Up to here\. -->)", re.DOTALL)


def page(text: str) -> str:
    """Returns `text` of the page with the table as it must be."""
    table = "\n".join(("", *_rows(), "", ""))
    written, count = PLACE.subn(lambda found: f"{found[1]}{table}{found[2]}", text)
    assert count == 1, f"{DOCS.name} has no place for the table"
    return written


def _rows() -> Iterator[str]:
    yield "| format | models | thoughts | a call | several calls |"
    yield "| --- | --- | --- | --- | --- |"
    for name in sorted(TEMPLATES, key=lambda name: (list(FORMATS).index(str(readback_of(name).format)), name)):
        format_ = str(readback_of(name).format)
        cells = (f"`{format_}`", family_of(name), _thoughts(name, format_), _call(name, format_), _several(name))
        yield f"| {' | '.join(cells)} |"


def _thoughts(name: str, format_: str) -> str:
    marks, found = FORMATS[format_].reasoning, readback_of(name)
    if marks is None or found.fails(Ability.REASONING):
        return "-"
    if Ability.REASONING not in found.read and not shows_reasoning(format_, TEMPLATES[name]):
        return "-"
    return f"{_code(marks.begin)} ... {_code(marks.end)}"


def _call(name: str, format_: str) -> str:
    told = write(format_, Message(calls=[("N", "")]), call_arguments=[{"K": "V"}])
    return _code(told) + ("" if Ability.CALL in readback_of(name).written else ", untested")


def _several(name: str) -> str:
    found = readback_of(name)
    return "untested" if Ability.CALLS not in found.written else "-" if found.fails(Ability.CALLS) else "read"


def _code(text: str) -> str:
    shown = re.sub(r"\s*\n\s*", "", text.strip()).replace("|", "\\|")
    return f"``{shown}``" if "`" in shown else f"`{shown}`"


if __name__ == "__main__":
    DOCS.write_text(page(DOCS.read_text()))
