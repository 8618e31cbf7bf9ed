"""Errors that keep a benchmark from running, or its results from being compared.

BenchError             base
├── ImpossibleLoad     (also ValueError)  options that contradict each other, a value out of range, a wrong line
├── NotServed                             no worker serves the queue
├── WrongModel                            the queue's workers serve another model than the one that was named
├── BadResult          (also ValueError)  a file that holds no result of a benchmark
└── NotComparable                         two results that are not of the same model, load or machine
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class BenchError(Exception):
    """Base of all errors of this package."""


class ImpossibleLoad(BenchError, ValueError):
    """Options or input that make no load. The message names the option, or the file and its line, and the value."""


class NotServed(BenchError):
    """No worker serves the queue: requests sent to it would wait for one."""

    def __init__(self, queue: str, served: Sequence[str], *, any_more: bool = False) -> None:
        what = f"no worker serves queue {queue!r}" + (" any more" if any_more else "")
        super().__init__(f"{what}; queues that are served: {', '.join(served) or 'none'}")
        self.queue = queue
        self.served = tuple(served)


class WrongModel(BenchError):
    """The workers say that they serve another model, or do not say which."""

    def __init__(self, queue: str, wanted: str, found: str | None) -> None:
        super().__init__(
            f"the workers of queue {queue!r} serve {found or 'a model that they do not name'}, not {wanted}"
        )
        self.queue = queue
        self.wanted = wanted
        self.found = found


class BadResult(BenchError, ValueError):
    """A file that is not a result. The message names the file, and what is missing or wrong."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path


class NotComparable(BenchError):
    """Two results that differ in `fields`, such as `options.model`, with their values in the two files."""

    def __init__(self, fields: Sequence[tuple[str, Any, Any]]) -> None:
        told = "; ".join(f"{name} is {one!r} in the first and {other!r} in the second" for name, one, other in fields)
        super().__init__(f"the two cannot be compared: {told}")
        self.fields = tuple(fields)
