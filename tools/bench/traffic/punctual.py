"""An event loop that sends requests when they are due: asyncio's own rounds waits up to milliseconds."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` like `asyncio.run`."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_PunctualSelector()) if sys.platform == "linux" else asyncio.new_event_loop()


if sys.platform == "linux":

    class _PunctualSelector(selectors.EpollSelector):
        """Waits for its epoll object with `select`, which has microsecond resolution."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0.0
            return super().select(timeout)
