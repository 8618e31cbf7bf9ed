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


def listed_for(api: str) -> dict[tuple[str, str], str | None]:
    """Returns, by field and reason, the values that ask for nothing as the page writes them; None if it is ignored."""
    found: dict[tuple[str, str], str | None] = {}
    for line in (ROOT / "docs" / "gateway-fields.md").read_text().splitlines():
        if line.startswith("| `"):
            names, of, reason, *neutral = (cell.strip() for cell in line.strip("|").split(" | "))
            if api in _WIDER.get(of, of.split(", ")):
                for name in re.findall(r"`(\w+)`", names):
                    assert (name, reason) not in found
                    found[name, reason] = neutral[0] if neutral else None
    return found


def written(neutral: Sequence[Any]) -> str:
    """Returns values that ask for nothing as the page writes them."""
    return " or ".join(f"`{json.dumps(value)}`" for value in neutral)
