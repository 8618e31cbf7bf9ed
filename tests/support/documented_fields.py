"""Reads which fields docs/gateway-fields.md lists as ignored or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from penstock.protocol.wire import PARAMETERS
from tests.support.packages import ROOT

_WIDER = {"both": ("chat", "completions"), "all": ("chat", "completions", "responses")}


def honoured_by(api: str) -> set[str]:
    """Returns what docs/gateway.md names, and the parameters that docs/wire.md says the API takes."""
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "gateway.md").read_text()))
    return named | {name for name, each in PARAMETERS.items() if api in each.takers}


def ignored_for(api: str) -> dict[str, str]:
    """Returns the ignored fields with their reasons."""
    return _column("why", api)


def refused_for(api: str) -> dict[str, str]:
    """Returns the refused fields, with the values that ask for nothing as the page writes them."""
    return _column("but not", api)


def _column(title: str, api: str) -> dict[str, str]:
    """Returns, by field of an API, the last column of the tables where it has this title."""
    found: dict[str, str] = {}
    last = ""
    for line in (ROOT / "docs" / "gateway-fields.md").read_text().splitlines():
        names, of, cell = [each.strip() for each in line.split("|")[1:-1]] if line.startswith("| ") else ("", "", "")
        if names == "fields":
            last = cell
        elif last == title and api in _WIDER.get(of, of.split(", ")):
            for name in re.findall(r"`(\w+)`", names):
                assert name not in found
                found[name] = cell
    return found


def written(neutral: Sequence[Any]) -> str:
    """Returns values that ask for nothing as the page writes them."""
    return " or ".join(f"`{json.dumps(value)}`" for value in neutral)
