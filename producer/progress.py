"""Progress of a `map`, and the bar that shows it."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

from penstock.protocol.wire import in_python

BAR_CHARS = 30
REDRAW_S = 0.2


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

    @property
    def remaining_s(self) -> float | None:
        """Seconds that the rest will take at this rate; None: unknown."""
        return None if self.total is None or self.rate == 0 else (self.total - self.done) / self.rate


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


def has_viewer() -> bool:
    """Whether somebody sees a bar: at a terminal or in a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def clock(seconds: float) -> str:
    """Formats a duration as `1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


@contextmanager
def _bar() -> Iterator[ProgressCallback]:
    if _is_notebook() and find_spec("ipywidgets") is None:  # Rich draws nothing there
        yield _Line().show
        print(file=sys.stderr)  # noqa: T201  ends the line
        return
    from rich import console, progress  # loaded only for those who want a bar

    bar = progress.Progress(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[counts]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=None, counts="")
        yield lambda now: bar.update(task, total=now.total, completed=now.done, counts=_counts(now))


class _Line:
    """A bar of plain characters, drawn over itself in one line."""

    def __init__(self) -> None:
        self._drawn_s = -REDRAW_S
        self._width = 0

    def show(self, now: BulkProgress) -> None:
        is_end = now.done == now.total
        if not is_end and now.elapsed_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now.elapsed_s
        filled = BAR_CHARS * now.done // now.total if now.total else 0
        total = "?" if now.total is None else now.total
        left = "" if now.remaining_s is None or is_end else f", {clock(now.remaining_s)} left"
        bar = "#" * filled + "." * (BAR_CHARS - filled)
        line = f"[{bar}] {now.done}/{total} {_counts(now)} {clock(now.elapsed_s)}{left}"
        self._width = max(self._width, len(line))
        print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)  # noqa: T201


def _counts(now: BulkProgress) -> str:
    return f"{now.rate:.1f}/s, {now.in_flight} in flight, {now.failed} failed"


def _is_notebook() -> bool:
    """Whether output goes to the page of a Jupyter kernel."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or "google.colab" in str(type(shell))
