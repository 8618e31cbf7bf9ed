"""Ending tasks for certain."""

from __future__ import annotations

import asyncio

from penstock.producer.tasks import end_tasks


async def test_tasks_are_ended_even_if_a_library_swallows_the_first_cancellation() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task], patience_s=0.001)
    assert task.cancelled()
    assert swallowed == 3


async def test_an_error_of_a_task_that_is_ended_is_nobody_s() -> None:
    async def fails_at_the_end() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            raise OSError("on the way out")

    failed, ended = asyncio.create_task(fails_at_the_end()), asyncio.create_task(asyncio.sleep(0))
    await ended
    await end_tasks(iter([failed, ended]))
    assert isinstance(failed.exception(), OSError)
    assert not ended.cancelled()


async def test_no_tasks_are_ended_at_once() -> None:
    await end_tasks([])
