"""Many commands at one go, cheaply: a worker at full load writes tens of thousands of chunks a second."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis

from penstock.producer.redis.connection import BACKOFF, COMMAND_TIMEOUT_S, UNREACHABLE, RedisClient, cancel_and_wait

Command: TypeAlias = tuple[str | bytes | int, ...]

MAX_PIPELINES = 4  # of one batcher; each holds a connection
BATCH_COMMANDS = 256
BATCH_BYTES = 1 << 18


class Reconnected(exceptions.ConnectionError):
    """Nothing was sent: the connection is a new one, and the caller wanted to know before."""


async def execute(
    redis: RedisClient,
    commands: Sequence[Command],
    may_send: Callable[[], bool] = lambda: True,
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> list[Any]:
    """Sends `commands` as one pipeline. An error that the server answers stands in the place of that command's answer.

    The asyncio pipeline of redis-py does much in Python for each command and each answer, which costs more than all the
    rest; on a single server the same connection is used without it. Answers are as the server gives them.

    A script (EVAL) is sent as its hash there, and whole only to a server that does not know it, after the other
    commands: what follows a script in one pipeline must not depend on it.

    Args:
        redis: where to.
        commands: what.
        may_send: asked once there is a connection.
        timeout_s: for all answers together, on a single server.

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
    connection: Any = await redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    if not may_send():
        await redis.connection_pool.release(connection)
        raise Reconnected
    try:
        async with asyncio.timeout(timeout_s):
            answers = await _exchange(connection, [_hashed(command) for command in commands])
            unknown = [place for place, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]
            if unknown:
                whole = await _exchange(connection, [commands[place] for place in unknown])
                for place, answer in zip(unknown, whole, strict=True):
                    answers[place] = answer
            return answers
    except BaseException:  # answers that nobody read would be taken for those of the next commands
        await connection.disconnect(nowait=True)
        raise
    finally:
        await redis.connection_pool.release(connection)


async def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    await connection.send_packed_command([b"".join([pack_command(cast("Any", command)) for command in commands])])
    return [await _read(connection) for _ in commands]


def _hashed(command: Command) -> Command:
    return ("EVALSHA", script_hash(str(command[1])), *command[2:]) if command[0] == "EVAL" else command


@functools.cache  # there are a dozen scripts
def script_hash(source: str) -> str:
    """By which EVALSHA names a script."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


async def _read(connection: Any) -> Any:
    try:
        return await connection.read_response(
            timeout=math.inf
        )  # one timer for all answers is cheaper than one for each
    except exceptions.ResponseError as error:
        return error


class Batcher:
    """Sends what the tasks of one event loop ask for at about the same time as one pipeline.

    A command waits for the next turn of the event loop, so that those of one turn go together. While `MAX_PIPELINES`
    are under way, what comes waits and goes together as well. Under Redis Cluster each command goes by itself, for its
    keys tell where to.

    Args:
        redis: where to.
        retries: how often a pipeline whose connection broke is sent again, whole; above 0 only for commands that may
            run twice. Where no connection is to be had, it is for `redis` to try again.
    """

    def __init__(self, redis: RedisClient, *, retries: int) -> None:
        self._redis = redis
        self._retries = retries
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._is_about_to_send = False

    async def execute(self, *command: str | bytes | int) -> Any:
        """The server's answer to one command, as the server gives it. Cancelled, the command may still be sent.

        Raises:
            RedisError, OSError: the server's error, or the connection failed and the command may have been executed.
        """
        if not isinstance(self._redis, Redis):
            return await self._redis.execute_command(*command)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((command, answer))
        if not self._is_about_to_send and len(self._senders) < MAX_PIPELINES:
            self._is_about_to_send = True
            sender = loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await answer

    async def close(self) -> None:
        """Ends what is under way; who waits for it is cancelled."""
        await cancel_and_wait(*self._senders)

    async def _send(self) -> None:
        self._is_about_to_send = False
        while batch := self._take():
            try:
                answers = await self._try([command for command, _ in batch])
            except Exception as error:  # whoever asked is to know
                answers = [error] * len(batch)
            except BaseException:
                for _, answer in batch:
                    answer.cancel()
                raise
            for (_, answer), value in zip(batch, answers, strict=True):
                if answer.done():  # whoever asked has gone
                    continue
                if isinstance(value, Exception):
                    answer.set_exception(value)
                else:
                    answer.set_result(value)

    async def _try(self, commands: Sequence[Command]) -> list[Any]:
        is_connected = False

        def note() -> bool:
            nonlocal is_connected
            is_connected = True
            return True

        for num_failures in range(1, self._retries + 1):
            is_connected = False
            try:
                return await execute(self._redis, commands, note)
            except UNREACHABLE as error:
                if not is_connected or isinstance(error, exceptions.AuthenticationError):
                    raise
            await asyncio.sleep(BACKOFF.compute(num_failures))
        return await execute(self._redis, commands)

    def _take(self) -> list[tuple[Command, asyncio.Future[Any]]]:
        batch: list[tuple[Command, asyncio.Future[Any]]] = []
        num_bytes = 0
        while self._waiting and len(batch) < BATCH_COMMANDS and num_bytes < BATCH_BYTES:
            batch.append(self._waiting.popleft())
            num_bytes += sum(len(part) for part in batch[-1][0] if not isinstance(part, int))
        return batch
