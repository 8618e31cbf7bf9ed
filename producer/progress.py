"""The progress bar of `map`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from penstock.producer.bulk import BulkProgress, ProgressCallback


@contextmanager
def shown_bar() -> Iterator[ProgressCallback]:
    """Shows a bar on stderr while the block lasts; call the result with each new state."""
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f}/s, {task.fields[in_flight]} in flight, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=None, rate=0.0, in_flight=0, failed=0)

        def show(now: BulkProgress) -> None:
            bar.update(
                task, total=now.total, completed=now.done, rate=now.rate, in_flight=now.in_flight, failed=now.failed
            )

        yield show
