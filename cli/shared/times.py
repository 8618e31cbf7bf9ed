"""Moments and durations as people write and read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import typer

_LAST_MS = 253_402_300_799_999
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def moment(ms: int) -> str:
    """Formats milliseconds since 1970 as ISO 8601."""
    if ms > _LAST_MS:  # anybody may choose the id of an entry, and with it its time
        return f"after the year 9999 ({ms} ms)"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def seconds(text: str, option: str) -> float:
    """Parses a time such as `90m`.

    Raises:
        BadParameter: `text` is not such a time; the message names `option`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90m, 12h or 7d", param_hint=option)
    return float(match[1]) * _SECONDS[match[2]]
