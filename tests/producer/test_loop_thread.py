"""A caller that is interrupted leaves nothing running behind, whenever that happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.producer import loop_thread
from penstock.producer.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.stop()


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
            assert endless.begun.wait(60)
            raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(endless())
    assert endless.cancelled.wait(60)


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
    assert not endless.begun.is_set() or endless.cancelled.wait(60)
    assert loop.call(_num_tasks()) == 1


async def _num_tasks() -> int:
    """Beside the loop's own."""
    return len(asyncio.all_tasks()) - 1


def test_stopping_ends_a_call(loop: LoopThread) -> None:
    endless = Endless()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(loop.call, endless())
        assert endless.begun.wait(60)
        loop.stop()
        with pytest.raises(CancelledError):
            call.result(60)


def test_the_coroutines_own_error_comes_through(loop: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        loop.call(fail())


def test_a_loop_that_was_stopped_takes_no_calls(loop: LoopThread) -> None:
    loop.stop()
    with pytest.raises(RuntimeError, match="is closed"):
        loop.call(asyncio.sleep(0))
