"""Prints a comparison for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.tools.bench.comparing.comparison import Comparison, ComparisonRow

_COLOURS = {"better": "green", "worse": "red", "": ""}


def as_table(found: Comparison) -> Group:
    """Returns the table, other differences, and where the intervals come from."""
    more = f", and {len(found.pairs) - 1} more such pairs" if len(found.pairs) > 1 else ""
    table = Table(title=f"{found.second.path} against {found.first.path}{more}", title_justify="left")
    table.add_column("")
    for name in ("first", "second", "change", "95 % interval", *([f"p, {found.test}"] if found.test else [])):
        table.add_column(name, justify="right")
    table.add_column("second is")
    for row in found.rows:
        cells = [value_text(row, row.first), value_text(row, row.second), change_text(row), interval_text(row)]
        p = [p_text(row)] if found.test else []
        table.add_row(f"{row.figure.name}, {row.figure.unit}", *cells, *p, Text(row.verdict, _COLOURS[row.verdict]))
    return Group(table, *(Text(line) for line in _notes(found)))


def value_text(row: ComparisonRow, value: float | None) -> str:
    if value is None:
        return "-"
    if row.figure.kind == "share":
        return f"{value:.1%}".replace("%", "")
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def change_text(row: ComparisonRow) -> str:
    return "-" if row.change is None else _points(row.change) + _unit(row)


def interval_text(row: ComparisonRow) -> str:
    if row.interval is None:
        return "-"
    return f"{_points(row.interval.low)} to {_points(row.interval.high)}{_unit(row)}"


def p_text(row: ComparisonRow) -> str:
    if row.interval is None or row.interval.p is None:
        return "-"
    return f"{row.interval.p:.3f}" if row.interval.p >= 0.001 else "< 0.001"


def _points(change: float) -> str:
    return f"{100 * change:+.1f}"


def _unit(row: ComparisonRow) -> str:
    return " points" if row.figure.kind == "share" else " %"


def _notes(found: Comparison) -> Iterator[str]:
    for name, one, other in found.obstacles:
        yield f"not the same: {name}: {_short(one)} -> {_short(other)}"
    for name, one, other in found.others:
        yield f"{name}: {_short(one)} -> {_short(other)}"
    busy = [result.machine.get("load_before") for pair in found.pairs for result in pair]
    if None not in busy:
        cores = found.second.machine.get("cores")
        yield f"how busy the machine was before each: {', '.join(map(str, busy))} processes at work, on {cores} cores"
    yield found.method + "."


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
