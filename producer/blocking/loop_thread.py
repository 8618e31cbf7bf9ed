"""An event loop in a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.producer.blocking import forks

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads. Its thread is a daemon: without `stop`, the program can still end."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # while callers are served
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._generation = forks.generation()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def is_inherited(self) -> bool:
        """Whether the thread was started in a process that this one is a fork of: then it does not run here."""
        return self._generation != forks.generation()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for the result. When the waiting itself is interrupted (Ctrl-C), the coroutine is cancelled.

        Raises:
            RuntimeError: the loop was stopped, belongs to the process that this one is a fork of, or this is its own
                thread, which would wait for itself.
        """
        loop = self._loop
        if loop is None or self.is_inherited or threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(self._refusal())
        ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        try:
            loop.call_soon_threadsafe(self._begin, coroutine, ended)
            # Ctrl-C may interrupt this wait at any point without harm. A wait for a Future, if interrupted, could leave
            # the Future's lock taken.
            task = ended.get()
        except BaseException:
            _abandon(coroutine, loop)
            raise
        try:
            return task.result()
        except asyncio.CancelledError:  # by `stop`; in this thread it is an error like any other
            raise CancelledError from None

    def post(self, start: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Starts a coroutine without waiting, for finalizers, which may run in any thread. A no-op once stopped."""
        loop = self._loop
        if self.is_inherited:
            forks.keep(start)
        elif loop is not None:
            with contextlib.suppress(RuntimeError):  # it was stopped a moment ago
                loop.call_soon_threadsafe(lambda: self._keep(loop.create_task(start())))

    def stop(self) -> None:
        """Cancels what still runs and ends the thread. Harmless when repeated."""
        loop = self._loop
        if self.is_inherited:
            forks.keep(self)
        elif loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _refusal(self) -> str:
        if self._loop is None:
            return "the client is closed"
        if self.is_inherited:
            return "this was begun in the process that this one is a fork of: begin it here"
        return "a blocking call from inside a progress callback can't end"

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        await self._stopping.wait()
        self._loop = None  # from here on callers get an error

    def _begin(self, coroutine: Coroutine[Any, Any, T], ended: SimpleQueue[asyncio.Task[T]]) -> None:
        def end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # marks it as retrieved, even if the caller is gone
            ended.put(task)

        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(end)
        self._keep(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Keeps a reference to the task: the loop itself holds tasks only weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _abandon(coroutine: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop) -> None:
    """Ends a coroutine that has no task as far as the caller knows: Ctrl-C may come before the caller has got one."""

    def cancel() -> None:
        tasks = [task for task in asyncio.all_tasks() if task.get_coro() is coroutine]
        for task in tasks:
            task.cancel()
        if not tasks:
            coroutine.close()

    try:
        loop.call_soon_threadsafe(cancel)
    except RuntimeError:  # the loop was stopped, and everything in it
        coroutine.close()
