"""An event loop in a thread: any thread may call, nothing hangs at the end, an interrupt leaves nothing running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.producer.blocking import loop_thread
from penstock.producer.blocking.loop_thread import LoopThread
from tests.support.patience import WAIT_S


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.stop()


async def name_of_thread() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise LookupError("nobody")


def test_calls_run_in_its_own_thread_and_bring_results_and_errors(loop: LoopThread) -> None:
    assert loop.call(name_of_thread()) == "test-loop"
    with pytest.raises(LookupError, match="nobody"):
        loop.call(fail())


def test_many_threads_wait_at_once(loop: LoopThread) -> None:
    everybody_is_here = asyncio.Barrier(10)

    async def meet(number: int) -> int:
        await everybody_is_here.wait()
        return number

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(lambda number: loop.call(meet(number)), range(10))) == list(range(10))


def test_a_call_from_its_own_thread_is_refused_instead_of_waiting_for_itself(loop: LoopThread) -> None:
    async def call_again() -> None:
        loop.call(name_of_thread())

    with pytest.raises(RuntimeError, match="can't end"):
        loop.call(call_again())


def test_stopping_cancels_what_runs_and_refuses_what_comes(loop: LoopThread) -> None:
    started = threading.Event()

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.call, endless())
        assert started.wait(WAIT_S)
        loop.stop()
        assert waiting.exception(WAIT_S) is not None
    with pytest.raises(RuntimeError, match="the client is closed"):
        loop.call(name_of_thread())
    loop.post(name_of_thread)  # a finalizer that comes late
    loop.stop()


def test_what_is_posted_runs_without_anybody_waiting(loop: LoopThread) -> None:
    ran = threading.Event()

    async def note() -> None:
        ran.set()

    loop.post(note)
    assert ran.wait(WAIT_S)


class Endless:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def test_an_interrupt_while_waiting_cancels_the_coroutine(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()

    class Interrupted(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert endless.begun.wait(WAIT_S)
            raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(endless())
    assert endless.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_an_interrupt_before_there_is_anything_to_wait_for_cancels_the_coroutine(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, is_scheduled: bool
) -> None:
    endless, calls = Endless(), []

    def interrupted(self: asyncio.BaseEventLoop, callback: Callable[..., object], *args: Any, **more: Any) -> object:
        calls.append(callback)
        if is_scheduled or len(calls) > 1:
            schedule(self, callback, *args, **more)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return None

    schedule = asyncio.BaseEventLoop.call_soon_threadsafe
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):  # a coroutine that is forgotten would be warned of
        loop.call(endless())
    monkeypatch.undo()
    loop.call(asyncio.sleep(0))  # after what the interrupt has left to do
    assert not endless.begun.is_set() or endless.cancelled.wait(WAIT_S)
    assert loop.call(_num_tasks()) == 1


async def _num_tasks() -> int:
    """Returns the number of tasks beside the loop's own."""
    return len(asyncio.all_tasks()) - 1


def test_stopping_ends_a_call(loop: LoopThread) -> None:
    endless = Endless()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(loop.call, endless())
        assert endless.begun.wait(WAIT_S)
        loop.stop()
        with pytest.raises(CancelledError):
            call.result(WAIT_S)
