"""Waits until an enqueued request is on the server's disk."""

from __future__ import annotations

from typing import Any

from redis import exceptions
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import PipelineCommand

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.silence import blocking

CONFIRM_TIMEOUT_MS = 5000
"""Longer than the second that `appendfsync everysec` lets pass, shorter than the connection's own time limit."""

_TRIES = 3
_ENOUGH = 1  # the server's own append-only file; not those of replicas


async def probe(redis: RedisClient, key: str) -> None:
    """Asks the server of `key` whether it can confirm anything at all.

    Raises:
        ResponseError: it does not know WAITAOF, or keeps no append-only file.
    """
    command = ("WAITAOF", _ENOUGH, 0, 1)
    if isinstance(redis, RedisCluster):
        await redis.initialize()
        node: Any = redis.get_node_from_key(key)
        await node.execute_command(*command)
    else:
        await redis.execute_command(*command)


async def confirm(redis: RedisClient, key: str, *, ttl_s: int) -> str | None:
    """Waits until everything written so far to the server of `key` is on its disk; returns why it is not, or None.

    WAITAOF waits for the writes of its own connection, and those to be confirmed may have come over another one. So the
    same connection first makes one more write, which sets the time to live of `key` to `ttl_s`.

    Raises:
        RedisError, OSError: the connection failed.
    """
    for _ in range(_TRIES):
        with blocking(CONFIRM_TIMEOUT_MS / 1000):
            wait = ("WAITAOF", 1, 0, CONFIRM_TIMEOUT_MS)
            touched, confirmed = await _send_together(redis, key, ("EXPIRE", key, ttl_s), wait)
        if not isinstance(touched, Exception):
            break
        await redis.expire(key, ttl_s)  # follows a slot that has moved, and raises errors that do not pass
    if isinstance(touched, Exception) or isinstance(confirmed, Exception):
        return str(touched if isinstance(touched, Exception) else confirmed)
    if not touched:
        return "the server has lost it again"
    if confirmed[0] < _ENOUGH:
        return f"no fsync within {CONFIRM_TIMEOUT_MS / 1000:g} s"
    return None


async def _send_together(redis: RedisClient, key: str, *commands: tuple[Any, ...]) -> list[Any]:
    """Returns answers, or errors in their place, of commands sent together over one connection to the server of
    `key`.
    """
    if not isinstance(redis, RedisCluster):
        async with redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(await pipe.execute(raise_on_error=False))
    await redis.initialize()
    node: Any = redis.get_node_from_key(key)
    queued = [PipelineCommand(position, *command) for position, command in enumerate(commands)]
    try:
        await node.execute_pipeline(queued)
    except exceptions.ConnectionError as error:
        return [error] * len(commands)
    return [command.result for command in queued]
