"""A caller that is interrupted leaves nothing running behind, whenever that happens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

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

    def interrupted(self: object, timeout: float | None = None) -> None:
        assert endless.begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(endless())
    assert endless.cancelled.wait(60)


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_an_interrupt_before_there_is_a_future_cancels_the_coroutine(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, is_scheduled: bool
) -> None:
    endless, schedule = Endless(), asyncio.run_coroutine_threadsafe

    def interrupted(coroutine: Coroutine[Any, Any, None], on: asyncio.AbstractEventLoop) -> None:
        if is_scheduled:
            schedule(coroutine, on)
            assert endless.begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):  # a coroutine that is forgotten would be warned of
        loop.call(endless())
    monkeypatch.undo()
    loop.call(asyncio.sleep(0))  # after what the interrupt has left to do
    assert endless.begun.is_set() == is_scheduled
    assert not is_scheduled or endless.cancelled.wait(60)


def test_the_coroutines_own_error_comes_through(loop: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        loop.call(fail())


def test_a_loop_that_was_stopped_takes_no_calls(loop: LoopThread) -> None:
    loop.stop()
    with pytest.raises(RuntimeError, match="is closed"):
        loop.call(asyncio.sleep(0))
