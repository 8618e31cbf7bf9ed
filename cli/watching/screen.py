"""Lays the tables out on one screen, or as a page that is printed once."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.shared.redis import visible
from penstock.cli.watching.board import Board
from penstock.cli.watching.view import (
    RowSelection,
    duration,
    lanes_table,
    letters_table,
    reasons,
    running_table,
    summary,
    workers_table,
)
from penstock.protocol.operations.snapshot import Snapshot

HELP = "Tab table  ↑↓ row  d drain  c cancel  r replay  q quit"
FOCUS = "▸"
STALE_S = 5.0
"""Stale age of lane counts, which a live worker keeps within two seconds."""

_SUMMARY_LINES = 3
_MOST_FOOTER_LINES = 4
_RATE_COLUMNS = 40  # beside the sparkline


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading, and a table below it if there is anything to show."""

    name: str
    heading: str
    num_rows: int
    table: Callable[[int], RenderableType]  # called with the most rows to show


def screen(board: Board, width: int, height: int) -> Group:
    """Fits the sections to the terminal: rows are left out one by one, from whichever table has most.

    If not even all headings fit, only the table that keys act on is shown.
    """
    sections = _sections(board.snapshot, board, width)
    footer = _footer(board, width)
    if height < _num_fixed(sections) + len(footer) + len(sections):
        sections = [section for section in sections if section.name == board.pane]
    fixed = _num_fixed(sections) + len(footer)
    shares = _shared(max(0, height - fixed), [section.num_rows for section in sections])
    parts: list[RenderableType] = list(summary(board.snapshot, list(board.history), max(1, width - _RATE_COLUMNS)))
    for section, share in zip(sections, shares, strict=True):
        is_focused = section.name == board.pane
        heading = Text(f"{FOCUS} {section.heading}", "bold cyan") if is_focused else Text(section.heading, "bold")
        parts += [Text(""), heading]
        if share:
            parts.append(section.table(share))
    parts += [Text("")] * (height - fixed - sum(shares))
    parts += footer
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _num_fixed(sections: Sequence[_Section]) -> int:
    """Counts lines above the footer that are not rows: summary, and each section's blank line, heading and titles."""
    return _SUMMARY_LINES + sum(2 + (section.num_rows > 0) for section in sections)


def page(snapshot: Snapshot) -> Group:
    """Stacks everything up."""
    parts: list[RenderableType] = [*summary(snapshot, [])]
    for section in _sections(snapshot, None, None):
        parts += [Text(""), Text(section.heading, "bold")]
        if section.num_rows:
            parts.append(section.table(0))
        if section.name == "workers":
            parts += [Text(line) for line in reasons(snapshot.workers)]
    return Group(*parts)


def _sections(snapshot: Snapshot, board: Board | None, width: int | None) -> list[_Section]:
    """Without a board, as for `page`, tables show all rows."""

    def rows(name: str, most: int) -> RowSelection:
        if board is None:
            return RowSelection()
        return RowSelection(most, board.selected if board.pane == name else None, width)

    workers, running, letters = snapshot.workers, snapshot.running, snapshot.letters
    untold = snapshot.num_running - len(running)
    more = f", {untold:,} more that no worker has told of" if untold > 0 else ""
    age = (
        "" if snapshot.load_age_s is None or snapshot.load_age_s < 5 else f", as of {duration(snapshot.load_age_s)} ago"
    )
    num_lane_rows = sum(1 + sum(tenant.num_waiting > 0 for tenant in lane.tenants) for lane in snapshot.lanes)
    return [
        _Section("workers", f"workers: {len(workers):,}", len(workers),
                 lambda most: workers_table(workers, rows("workers", most))),
        _Section("lanes", f"lanes: {snapshot.num_waiting:,} waiting{age}", num_lane_rows,
                 lambda most: lanes_table(snapshot, rows("lanes", most))),
        _Section("requests", f"running requests: {len(running):,}{more}", len(running),
                 lambda most: running_table(running, rows("requests", most))),
        _Section("letters", f"dead letters: {snapshot.num_dead:,}", len(letters),
                 lambda most: letters_table(letters, rows("letters", most))),
    ]  # fmt: skip


def _shared(num_lines: int, wanted: list[int]) -> list[int]:
    """Deals out lines one at a time to the sections that want more."""
    shares = [0] * len(wanted)
    while num_lines and shares != wanted:
        for place, want in enumerate(wanted):
            if num_lines and shares[place] < want:
                shares[place] += 1
                num_lines -= 1
    return shares


def _footer(board: Board, width: int) -> list[Text]:
    """Returns what keys do, or instead of it what is asked or said, in as many lines as that takes."""
    if board.asked is not None:
        return _wrapped(f"[y/N] {visible(board.asked.question)}", width, "bold yellow")
    if board.trouble:
        return _wrapped(f"no newer look: {visible(board.trouble)}", width, "bold red")
    if board.note:
        return _wrapped(visible(board.note), width, "bold")
    place = board.selected if board.pane == "workers" else None
    why = [] if place is None else reasons(board.snapshot.workers[place : place + 1])
    return [Text("  ·  ".join([HELP, *why]), "dim")]


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    lines = textwrap.wrap(text, max(width, 10), max_lines=_MOST_FOOTER_LINES, break_on_hyphens=False)
    return [Text(line, style) for line in lines]
