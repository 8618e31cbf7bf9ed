"""Progress of a `map`, and the bar that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from penstock.protocol.wire import in_python


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """Progress of a `map`. `total` is None until all prompts are known; `done` includes those that failed."""

    total: int | None = None
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        """Prompts per second so far."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0


ProgressCallback: TypeAlias = Callable[[BulkProgress], None]


def check_progress(value: object) -> None:
    """Raises TypeError unless `shown` takes the value."""
    if not (isinstance(value, bool) or callable(value)):
        raise TypeError(f"progress must be True, False or a function, not {in_python(value)}")


def ignore(progress: BulkProgress) -> None:
    """Does nothing."""


@contextmanager
def shown(progress: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    """Yields the function to call with each new state in the block: a bar on stderr, the caller's, or a no-op."""
    if callable(progress):
        yield progress
    elif progress:
        with _bar() as show:
            yield show
    else:
        yield ignore


@contextmanager
def _bar() -> Iterator[ProgressCallback]:
    from rich import console, progress  # loaded only for those who want a bar

    bar = progress.Progress(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(
            "{task.fields[rate]:.1f}/s, {task.fields[in_flight]} in flight, {task.fields[failed]} failed"
        ),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=None, rate=0.0, in_flight=0, failed=0)

        def show(now: BulkProgress) -> None:
            bar.update(
                task, total=now.total, completed=now.done, rate=now.rate, in_flight=now.in_flight, failed=now.failed
            )

        yield show
