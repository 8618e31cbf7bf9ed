"""Ends tasks reliably, and lets callers share one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, patience_s: float = 0.2) -> None:
    """Cancels `tasks` until they have ended, however they end; an error that ends one now is dropped.

    Once is not enough: redis-py, as of 8.1, loses a cancellation that arrives together with an answer. Up to Python
    3.11 it sends with `asyncio.wait_for`, which loses one that arrives as the sending completes.

    Args:
        tasks: what to end.
        patience_s: time between two cancellations; longer than a cancelled task's cleanup.
    """
    everyone = set(tasks)
    pending = {task for task in everyone if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=patience_s)
    for task in everyone:
        _see(task)


class Joined(Generic[T]):
    """Runs `work` once at a time. All callers that arrive while it runs share its outcome, even an error, and none
    waits for a retry of what has just failed. It goes on when callers are cancelled.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def run(self) -> T:
        # Work that has ended is never joined, not even before its callbacks run: awaiting it would let no other task
        # run, so that a caller that asks until the outcome is new enough would ask for ever.
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
            self._task.add_done_callback(_see)
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Ends the running work; callers that wait for it are cancelled."""
        if self._task is not None:
            await end_tasks([self._task])


def _see(task: asyncio.Task[Any]) -> None:
    """Marks the error of an ended task as seen: nobody may wait for it any more."""
    if not task.cancelled():
        task.exception()
