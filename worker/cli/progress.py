"""How a start-up that takes a while is shown: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import structlog
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.worker.cli.console import console

Report: TypeAlias = Callable[[int, int, str], None]
"""Called with (done, total, what comes next)."""

Say: TypeAlias = Callable[[str], None]
"""Called with how far it is, such as `warming up: 12 of 40 shapes`."""

LOG_INTERVAL_S = 5.0
_SIZES = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@contextmanager
def shown(title: str, unit: str = "", say: Say | None = None) -> Iterator[Report]:
    """Shows the progress of one long step while the block lasts.

    Args:
        title: of the step.
        unit: what is counted, such as `shapes`; of `bytes` the size is shown.
        say: is told, too.
    """
    show = _bar if sys.stderr.isatty() else _logged
    if say is not None:
        say(title)
    with show(title, unit) as report:
        yield report if say is None else _both(report, title, unit, say)


def amount(done: int, total: int, unit: str) -> str:
    """`12 of 40 shapes`, `0.3 of 1.2 GB`."""
    if unit != "bytes":
        return f"{done} of {total} {unit}".rstrip()
    name, size = next((each for each in _SIZES if total >= each[1]), ("bytes", 1))
    return f"{done / size:.1f} of {total / size:.1f} {name}" if size > 1 else f"{done} of {total} bytes"


def _both(report: Report, title: str, unit: str, say: Say) -> Report:
    def tell(done: int, total: int, what: str) -> None:
        report(done, total, what)
        say(f"{title}: {amount(done, total, unit)}")

    return tell


@contextmanager
def _bar(title: str, unit: str) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}"),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, what="", amount="")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, what=what, amount=amount(done, total, unit)
        )


@contextmanager
def _logged(title: str, unit: str) -> Iterator[Report]:
    started_s = last_s = time.monotonic()
    log = structlog.get_logger()

    def report(done: int, total: int, what: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LOG_INTERVAL_S:
            last_s = time.monotonic()
            log.info(title, progress=amount(done, total, unit), what=what)

    log.info(title)
    yield report
    log.info(title, done=True, seconds=round(time.monotonic() - started_s, 1))
