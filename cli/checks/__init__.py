"""Checks of `penstock doctor`. Each returns findings, and never raises for a problem that it is there to find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` says what to do about a `warn` or `fail`."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""
