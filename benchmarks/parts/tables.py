"""Where measurements are kept, and their rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"


def table_of(title: str, rows: Sequence[Mapping[str, Any]], *, digits: int = 2) -> Table:
    """The first row gives the columns; text is left-aligned, numbers right, with `digits` decimals."""
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.{digits}f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table
