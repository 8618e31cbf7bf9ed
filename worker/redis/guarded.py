"""Sends a worker's single commands to Redis, and sets aside foreign data in the queue's keys on the way."""

import asyncio
import re
from collections.abc import Sequence

from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.queue.junk import Guard
from penstock.protocol.redis.connection import RedisClient, make_group
from penstock.worker.redis import retries

_STAYS = frozenset({"requests"})
_PLACES = re.compile(r"penstock:\{([^{}]+)\}:lanes:(?:bands|band:.*|tenant:.*|due|named)")


async def _relane(redis: RedisClient, moved: Sequence[str]) -> None:
    """Gives waiting entries their places again, page by page, if the keys that hold the order were set aside.

    It keeps trying while the server refuses, as nobody would do it later.
    """
    backoff = retries.Backoff()
    for queue in {found[1] for key in moved if (found := _PLACES.fullmatch(key)) is not None}:
        after: bytes | None = b"0-0"
        while after is not None:
            try:
                after = await Guard(_STAYS).execute_one(redis, scripts.relane(queue, after=after.decode()))
            except (*retries.REDIS_ERRORS, OSError) as error:
                if not retries.must_wait(error):
                    raise
                await asyncio.sleep(backoff.next_s())


GUARD = Guard(_STAYS, after=_relane)
"""Workers can recreate every key but the request stream; foreign data in a request's keys ends that request."""

execute_one = GUARD.execute_one


async def make_guarded_group(redis: RedisClient, stream: str) -> None:
    """Makes the group; sets foreign data in the key aside.

    Raises:
        JunkFound: the key of the requests is not a stream.
        RedisError: the server is in trouble.
    """
    try:
        await make_group(redis, stream)
    except exceptions.ResponseError as error:
        await GUARD.mend(redis, ("XGROUP", "CREATE", stream, keys.GROUP, "0", "MKSTREAM"), error)
