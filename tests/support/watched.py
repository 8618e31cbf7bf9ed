"""Waits for what a task is to do, and fails with that task instead of waiting in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.support.patience import WAIT_S


@asynccontextmanager
async def watched(task: asyncio.Task[Any], while_: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    """Runs a block that ends with the exception that ends `task`, unless `while_` says that the test itself looks at
    it.
    """
    block = asyncio.current_task()
    assert block is not None
    failure: BaseException | None = None

    def note(ended: asyncio.Task[Any]) -> None:
        nonlocal failure
        if not ended.cancelled() and (error := ended.exception()) is not None and while_():
            failure = error
            block.cancel()

    task.add_done_callback(note)
    try:
        yield
        if failure is not None:
            await asyncio.sleep(0)  # the cancellation
    except asyncio.CancelledError:
        if failure is None:
            raise
        block.uncancel()
        raise AssertionError(f"the task {task.get_name()!r}, whose work the test waits for, ended") from failure
    finally:
        task.remove_done_callback(note)


async def ended(task: asyncio.Task[Any]) -> None:
    """Waits until `task` has ended, however. If it does not, it is cancelled and the test fails."""
    done, _ = await asyncio.wait({task}, timeout=WAIT_S)
    if not done:
        task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wait({task}), WAIT_S)
        raise AssertionError(f"the task {task.get_name()!r} does not end")
