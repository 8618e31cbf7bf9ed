"""What a worker asks Redis for one by one. What is no worker's in the keys of its queue is set aside on the way."""

from redis import exceptions

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient, make_group
from penstock.producer.redis.junk import Guard

GUARD = Guard(stays=frozenset({"requests"}))
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
