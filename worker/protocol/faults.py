"""What an error from Redis means for the worker: wait and try again, give up the one request, or give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from redis import exceptions

from penstock.producer.redis.faults import is_no_group, is_refused, may_pass
from penstock.worker.errors import RedisRefused
from penstock.worker.hints import hint_for
from penstock.worker.readiness import Readiness
from penstock.worker.tasks import pause

REDIS_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""All that the Redis library raises of its own: no node of a cluster in reach is no RedisError."""


def raise_if_final(error: BaseException) -> None:
    """Does nothing where a retry or another request may succeed.

    Raises:
        RedisRefused: Redis will keep refusing what a worker must do.
    """
    if is_refused(error):
        raise refusal(error) from error


def refusal(error: BaseException) -> RedisRefused:
    return RedisRefused(f"Redis refuses what a worker must do: {str(error).rstrip('.')}; {hint_for(error)}")


async def persist(work: Callable[[], Awaitable[object]], part: str, readiness: Readiness, stop: asyncio.Event) -> None:
    """Tries until it works or `stop` comes; meanwhile the worker is not ready.

    Raises:
        RedisRefused: the server will go on refusing.
    """
    backoff = Backoff()
    while not stop.is_set():
        try:
            await work()
        except REDIS_ERRORS as error:
            if not may_pass(error):
                raise refusal(error) from error
            readiness.lost_redis(part, error)
            await pause(stop, backoff.next_s())
        else:
            readiness.ready(part)
            return


async def survive(work: Awaitable[object], part: str, readiness: Readiness) -> None:
    """Runs one round of a periodic task; trouble with Redis makes the worker unready, and the next round tries again.

    Raises:
        RedisRefused: the server will keep refusing.
    """
    try:
        await work
    except REDIS_ERRORS as error:
        raise_if_final(error)
        if is_no_group(error):  # the intake makes it
            return
        if not may_pass(error):
            raise
        readiness.lost_redis(part, error)
    else:
        readiness.ready(part)


class Backoff:
    """Growing, jittered waits between tries, until `reset`."""

    def __init__(self, *, first_s: float = 0.05, longest_s: float = 2.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait before the next try."""
        delay_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, self._next_s * 2)
        return delay_s
