"""Shows the progress of a long step: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import structlog
from rich.filesize import pick_unit_and_suffix
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from penstock.engine.progress import BYTES, ReportProgress
from penstock.local.console import console

LOG_INTERVAL_S = 5.0
Say: TypeAlias = Callable[[str], None]
"""Called with the progress, such as `warming up: 12/40 shapes`."""


@contextmanager
def shown(title: str, unit: str = "", say: Say | None = None) -> Iterator[ReportProgress]:
    """Shows the progress of one long step, `title`, while the block lasts.

    Args:
        title: what is being done.
        unit: counted by the caller, in the plural; "" if nothing is counted.
        say: also called with the progress.
    """
    if say is not None:
        say(title)
    with _bar(title, unit) if sys.stderr.isatty() else _logged(title, unit) as report:
        yield report if say is None else _both(report, title, unit, say)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Shows a step that matters only to a person who waits. Call the result to change the title.

    Nothing is logged, and nothing is left on the terminal.
    """
    if sys.stderr.isatty():
        with console(stderr=True).status(escape(title)) as status:
            yield lambda changed: status.update(escape(changed))
    else:
        yield lambda changed: None


def _both(report: ReportProgress, title: str, unit: str, say: Say) -> ReportProgress:
    def tell(done: int, total: int, what: str) -> None:
        report(done, total, what)
        say(f"{title}: {_amount(done, total, unit) or what}")

    return tell


@contextmanager
def _logged(title: str, unit: str) -> Iterator[ReportProgress]:
    started = time.monotonic()
    log = structlog.get_logger()
    log.info(title)
    yield _logger(title, unit)
    log.info(title, done=True, seconds=round(time.monotonic() - started, 1))


@contextmanager
def _bar(title: str, unit: str) -> Iterator[ReportProgress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(), TextColumn("[dim]{task.fields[what]}"),
    )  # fmt: skip
    with Bars(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, amount="", what="")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total or None, amount=_amount(done, total, unit), what=escape(what)
        )


def _amount(done: int, total: int, unit: str) -> str:
    """Formats progress as `3/12 replies` or `1.2/3.4 GB`; both numbers are in the unit that fits the total. What is
    not counted has no amount.
    """
    if not unit or not total:
        return ""
    if unit != BYTES:
        return f"{done}/{total} {unit}"
    size, name = pick_unit_and_suffix(total, ["bytes", "kB", "MB", "GB", "TB"], 1000)
    digits = 0 if size == 1 else 1
    return f"{done / size:.{digits}f}/{total / size:.{digits}f} {name}"


def _logger(title: str, unit: str) -> ReportProgress:
    last = time.monotonic()
    log = structlog.get_logger().bind(**({"unit": unit} if unit else {}))

    def report(done: int, total: int, what: str) -> None:
        nonlocal last
        if not total:  # nothing follows until it ends, which may take minutes
            log.info(title, what=what)
        elif time.monotonic() - last >= LOG_INTERVAL_S:
            last = time.monotonic()
            log.info(title, step=done, of=total, what=what)

    return report
