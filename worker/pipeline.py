"""Many commands at one go, cheaply: a worker at full load writes tens of thousands of chunks a second."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis

from producer.connection import COMMAND_TIMEOUT_S, RedisClient
from worker.scripts import Command


class Reconnected(exceptions.ConnectionError):
    """Nothing was sent: the connection is a new one, and the caller wanted to know before."""


async def execute(
    redis: RedisClient, commands: Sequence[Command], may_send: Callable[[], bool] = lambda: True
) -> list[Any]:
    """Sends `commands` as one pipeline. An error that the server answers stands in the place of that command's answer.

    The asyncio pipeline of redis-py packs in Python, which costs more than all the rest; on a single server the same
    connection is used without it. Answers are as the server gives them.

    Args:
        redis: where to.
        commands: what.
        may_send: asked once there is a connection.

    Raises:
        Reconnected: `may_send` said no.
        RedisError, OSError: the connection failed; any of the commands may have been executed.
    """
    if not isinstance(redis, Redis):
        if not may_send():
            raise Reconnected
        pipeline = redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)
    packed = b"".join([pack_command(cast("Any", command)) for command in commands])
    connection: Any = await redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    if not may_send():
        await redis.connection_pool.release(connection)
        raise Reconnected
    try:
        await connection.send_packed_command(packed)
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            return [await _read(connection) for _ in commands]
    except BaseException:  # answers that nobody read would be taken for those of the next commands
        await connection.disconnect(nowait=True)
        raise
    finally:
        await redis.connection_pool.release(connection)


async def _read(connection: Any) -> Any:
    try:
        return await connection.read_response(
            timeout=math.inf
        )  # one timer for all answers is cheaper than one for each
    except exceptions.ResponseError as error:
        return error
