"""Early ends of a batch, and retries until then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from penstock.gateway.errors import ApiError, api_error
from penstock.gateway.standing import RedisHealth
from penstock.producer import PenstockError, ServerRefused
from penstock.protocol.tasks import end_tasks

T = TypeVar("T")

MAX_DELAY_S = 30.0
REDIS_DELAY_S = 1.0


class Stopped:
    """Says whether a batch was ended early, and why: the first reason counts."""

    def __init__(self) -> None:
        self.code: str | None = None
        self.message = ""
        self.error: ApiError | None = None
        """The error of the batch as a whole."""
        self._has_come = asyncio.Event()

    def stop(self, code: str, message: str, error: ApiError | None = None) -> None:
        if self.code is None:
            self.code, self.message, self.error = code, message, error
            self._has_come.set()

    def stop_with(self, error: ApiError) -> None:
        """Stops the batch because of an error."""
        self.stop("batch_cancelled", f"the batch was cancelled: {error.message}", error)

    async def wait(self, timeout_s: float) -> None:
        """Returns when it has stopped, or after the time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_come.wait()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`; None: the batch stopped first, and `work` was cancelled."""
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(self._has_come.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            await end_tasks(tasks)


async def retried(attempt: Callable[[], Awaitable[T]], standing: RedisHealth) -> T:
    """Returns the result of `attempt`, retried for as long as that may help. Redis failures are retried soon.

    Raises:
        ApiError: retrying does not help.
        ServerRefused: Redis refuses only this.
        Whatever else `attempt` raises.
    """
    delay_s = 0.0
    while True:
        try:
            return await attempt()
        except PenstockError as error:
            if standing.lost(error):
                await asyncio.sleep(random.uniform(0.5, 1.0) * REDIS_DELAY_S)
                continue
            if isinstance(error, ServerRefused):
                raise
            problem = api_error(error)
        except ApiError as error:
            problem = error
        if problem.retry_after_s is None or problem.ends_reply:
            raise problem
        delay_s = min(MAX_DELAY_S, max(problem.retry_after_s, 2 * delay_s))
        await asyncio.sleep(delay_s)
