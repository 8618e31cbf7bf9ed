"""An asyncio client with the thread that it runs in. A forked child gets new ones at its first use."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from penstock.producer.aio import AsyncClient
from penstock.producer.blocking import forks
from penstock.producer.blocking.loop_thread import LoopThread

T = TypeVar("T")


class Running(NamedTuple):
    """A client and its thread. Both end when `end` is called, or with the session or the program."""

    loop: LoopThread
    client: AsyncClient
    end: weakref.finalize[..., Session]


class Session:
    """Runs the calls of a `Client` and of its handles, which keep it alive. It begins when it is first used.

    Args:
        make: makes the asyncio client, also once more in each forked child.
    """

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._make = make
        self._running: Running | None = None

    def __repr__(self) -> str:
        return "nothing yet" if self._running is None else repr(self._running.client)

    def call(self, begin: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of a coroutine over the client. Raises as `now` and `LoopThread.call`."""
        running = self.now()
        return running.loop.call(begin(running.client))

    def now(self) -> Running:
        """Returns what runs in this process.

        Raises:
            RuntimeError: it is closed.
            BadAddress, TypeError, ValueError: the client could not be made.
        """
        running = self._running
        if running is not None and not running.end.alive:
            raise RuntimeError("the client is closed")
        if running is None or running.loop.is_inherited:
            with forks.renewing:
                if self._running is running:  # no other thread was quicker
                    self._running = self._begun()
                    if running is not None:
                        running.end.detach()
                        forks.keep(running)
                running = self._running
        assert running is not None  # noqa: S101  nobody takes away what has begun
        return running

    def close(self) -> None:
        """Closes the client and ends the thread. Harmless when repeated."""
        if self._running is not None:
            self._running.end()

    def _begun(self) -> Running:
        client = self._make()
        loop = LoopThread("penstock-client")
        return Running(loop, client, weakref.finalize(self, _close, loop, client))


def _close(loop: LoopThread, client: AsyncClient) -> None:
    if loop.is_inherited:
        forks.keep((loop, client))
        return
    with contextlib.suppress(RuntimeError):  # the loop was stopped before
        loop.call(client.close())
    loop.stop()
