"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


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
