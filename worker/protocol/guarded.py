"""What a worker asks Redis for one by one. What is no worker's in the keys of its queue is set aside on the way."""

import asyncio
import re
from collections.abc import Sequence

from redis import exceptions

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient, make_group
from penstock.producer.redis.junk import Guard
from penstock.worker.protocol import faults, scripts

_STAYS = frozenset({"requests"})
_PLACES = re.compile(r"penstock:\{([^{}]+)\}:lanes:(?:bands|band:.*|tenant:.*|due|named)")


async def _relane(redis: RedisClient, moved: Sequence[str]) -> None:
    """Where what says whose turn it is was set aside: all that waits gets its place again, page by page. Nobody would
    do it later, so it is tried again while the server refuses.
    """
    backoff = faults.Backoff()
    for queue in {found[1] for key in moved if (found := _PLACES.fullmatch(key)) is not None}:
        after: bytes | None = b"0-0"
        while after is not None:
            try:
                after = await Guard(_STAYS).execute_one(redis, scripts.relane(queue, after=after.decode()))
            except (*faults.REDIS_ERRORS, OSError) as error:
                if not faults.must_wait(error):
                    raise
                await asyncio.sleep(backoff.next_s())


GUARD = Guard(_STAYS, after=_relane)
"""The request stream alone is no worker's to make anew; and what a request's keys hold ends that request."""

execute_one = GUARD.execute_one


async def make_guarded_group(redis: RedisClient, stream: str) -> None:
    """As `make_group` of the client's.

    Raises:
        JunkFound: the key of the requests is no stream.
        RedisError: the server is in trouble.
    """
    try:
        await make_group(redis, stream)
    except exceptions.ResponseError as error:
        await GUARD.mend(redis, ("XGROUP", "CREATE", stream, keys.GROUP, "0", "MKSTREAM"), error)
