"""Requests cancellation of a request."""

from __future__ import annotations

from contextlib import suppress

from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient

CANCEL_TTL_S = 86_400


async def cancel(redis: RedisClient, queue: str, request_id: str) -> None:
    """Flags a request; the worker that has it, or takes it, ends it. The caller does not learn whether it exists.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
    """
    await redis.set(keys.cancel(queue, request_id), "1", ex=CANCEL_TTL_S)
    with suppress(exceptions.NoPermissionError):  # a role from before lanes: the flag acts at the claim
        await redis.sadd(keys.cancelled(queue), request_id)
        await redis.expire(keys.cancelled(queue), CANCEL_TTL_S)
