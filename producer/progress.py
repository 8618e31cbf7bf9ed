"""How far a `map` is, and the bar that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from penstock.producer.wire import in_python


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """How far a `map` is. `total` is None while the prompts are not all known; `done` counts the failed ones too."""

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
    """Raises TypeError unless it is what `shown` takes."""
    if not (isinstance(value, bool) or callable(value)):
        raise TypeError(f"progress must be True, False or a function, not {in_python(value)}")


def ignore(progress: BulkProgress) -> None:
    """Nobody looks."""


@contextmanager
def shown(progress: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    """What to call with each new state while the block lasts: a bar on stderr, the caller's function, or nothing."""
    if callable(progress):
        yield progress
    elif progress:
        with _bar() as show:
            yield show
    else:
        yield ignore


@contextmanager
def _bar() -> Iterator[ProgressCallback]:
    from rich import console, progress  # whoever wants no bar does not wait for them to load

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
