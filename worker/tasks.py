"""Adds what asyncio lacks: a signal, a pause that an event ends, a task shared by many callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.protocol.tasks import end_tasks

_T = TypeVar("_T")


async def pause(end: asyncio.Event, timeout_s: float) -> None:
    """Waits for `timeout_s`, or until `end`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await end.wait()


class Signal:
    """Wakes everybody who waits at the moment it fires. Check your condition before each wait."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """Returns a future of the next firing."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    async def wait(self) -> None:
        await self.next()


class Shared(Generic[_T]):
    """Runs something once at a time: callers that ask in the meantime get the same outcome."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await asyncio.shield(self._task)  # others wait for it, even if this caller is cancelled

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])
