"""Ending tasks for certain, and one task for many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, patience_s: float = 0.2) -> None:
    """Cancels `tasks` until they have ended, however they end; an error that ends one now has no one to hear it.

    Once is not enough: redis-py, as of 8.1, loses a cancellation that comes just as an answer does. Up to Python 3.11
    `asyncio.wait_for`, which it sends with, loses one that comes as the sending is done.

    Args:
        tasks: what to end.
        patience_s: between two cancellations; longer than what a task does when it is cancelled.
    """
    everyone = set(tasks)
    pending = {task for task in everyone if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=patience_s)
    for task in everyone:
        if not task.cancelled():
            task.exception()  # marks it as seen


class Joined(Generic[T]):
    """Runs `work` once at a time: all who ask while it runs get its outcome, an error too, and none waits for a second
    try of what has just failed. It goes on when they are cancelled.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None

    async def run(self) -> T:
        if self._task is None:
            self._task = asyncio.create_task(self._work())
            self._task.add_done_callback(self._ended)
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Ends what runs; who waits for it is cancelled."""
        if self._task is not None:
            await end_tasks([self._task])

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # marks it as seen, also where nobody waits any more
