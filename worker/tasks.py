"""Adds what asyncio lacks: a signal, and a pause that an event ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress


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
