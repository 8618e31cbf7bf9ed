"""How a start-up that takes a while is shown: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.worker.cli.console import console

Report = Callable[[int, int, str], None]
"""Called with (done, total, what comes next)."""

LOG_INTERVAL_S = 5.0


@contextmanager
def shown(title: str) -> Iterator[Report]:
    """Shows the progress of one long step, `title`, while the block lasts."""
    if sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        started = time.monotonic()
        log = structlog.get_logger()
        log.info(title)
        yield _logger(title)
        log.info(title, done=True, seconds=round(time.monotonic() - started, 1))


@contextmanager
def _bar(title: str) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}"),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


def _logger(title: str) -> Report:
    last = time.monotonic()
    log = structlog.get_logger()

    def report(done: int, total: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_INTERVAL_S:
            last = time.monotonic()
            log.info(title, step=done, of=total, what=what)

    return report
