"""Retries what Redis refuses, at the start and in periodic tasks, and computes the waits in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from redis import exceptions

from penstock.protocol.redis.faults import is_junk, is_no_group, is_refused, may_pass
from penstock.serving.hints import hint_for
from penstock.serving.readiness import Readiness
from penstock.worker.errors import RedisRefused
from penstock.worker.tasks import pause

REDIS_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""All errors of the Redis library: an unreachable cluster raises one that is not a RedisError."""


def must_wait(error: BaseException) -> bool:
    """Checks whether a serving worker should try the same command again: the refusal may pass, or people may fix it.

    Any other error is about the command itself, or about the key.
    """
    return may_pass(error) or is_refused(error)


def refusal(error: BaseException) -> RedisRefused:
    return RedisRefused(f"Redis refuses what a worker must do: {str(error).rstrip('.')}; {hint_for(error)}")


async def persist(work: Callable[[], Awaitable[object]], part: str, readiness: Readiness, stop: asyncio.Event) -> None:
    """Retries a step of the start until it works or `stop` comes; meanwhile the worker is not ready.

    Raises:
        RedisRefused: the server's refusal is permanent.
    """
    backoff = Backoff()
    while not stop.is_set():
        try:
            await work()
        except (*REDIS_ERRORS, OSError) as error:
            if not (may_pass(error) or is_junk(error)):
                raise refusal(error) from error
            readiness.lost_redis(part, error)
            await pause(stop, backoff.next_s())
        else:
            readiness.ready(part)
            return


async def survive(work: Awaitable[object], part: str, readiness: Readiness) -> bool:
    """Runs one round of a periodic task; trouble with Redis makes the worker unready, and the next round tries again.

    No answer of the server ends a serving worker at once: `Refusals` makes it drain after a while.

    Returns:
        Whether there was no trouble.
    """
    try:
        await work
    except (*REDIS_ERRORS, OSError) as error:
        if is_no_group(error):  # the intake makes the group
            return True
        readiness.lost_redis(part, error)
        return False
    readiness.ready(part)
    return True


class Backoff:
    """Computes growing, jittered waits between tries, until `reset`."""

    def __init__(self, *, first_s: float = 0.05, longest_s: float = 1.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Returns the wait before the next try."""
        delay_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, self._next_s * 2)
        return delay_s
