"""Sends many commands at once, cheaply: a worker at full load writes tens of thousands of chunks a second."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from penstock.protocol.redis.connection import BACKOFF, COMMAND_TIMEOUT_S, RedisClient
from penstock.protocol.redis.faults import UNREACHABLE, may_be_elsewhere
from penstock.protocol.redis.moves import check_kept, line_of
from penstock.protocol.tasks import end_tasks

Command: TypeAlias = tuple[str | bytes | int, ...]

MAX_PIPELINES = 4  # per batcher; each holds a connection
BATCH_COMMANDS = 256
BATCH_BYTES = 1 << 18


class Reconnected(exceptions.ConnectionError):
    """Nothing was sent: the connection is new, and the caller wanted to know first."""


async def execute(
    redis: RedisClient,
    commands: Sequence[Command],
    may_send: Callable[[], bool] = lambda: True,
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> list[Any]:
    """Sends `commands` as one pipeline. An error reply takes the place of that command's answer.

    redis-py's asyncio pipeline does much in Python for each command and answer, which costs more than all the rest. So
    a single server's connection is used without it. Answers are not converted.

    A script (EVAL) is sent as its hash. A server that does not know it gets the whole source, after the other commands:
    what follows a script in a pipeline must not depend on it. A command refused by a server that takes no writes is
    sent once more, to the server that the name now leads to (`moves`), unless it is a blocking read.

    Args:
        redis: the client to send with.
        commands: what to send.
        may_send: called each time a connection has been obtained.
        timeout_s: time limit for all answers together, on a single server.

    Raises:
        Reconnected: `may_send` returned False.
        RedisError, OSError: the connection failed; any of the commands may have been executed.
    """
    if not isinstance(redis, Redis):
        if not may_send():
            raise Reconnected
        return await _exchange_hashed(functools.partial(_exchange_with_cluster, redis), commands)
    line = line_of(redis)
    bundle = line.bundle()
    num_drops = bundle.num_drops
    answers = await _execute(redis, commands, may_send, timeout_s)
    refused = [
        place for place, answer in enumerate(answers) if isinstance(answer, Exception) and may_be_elsewhere(answer)
    ]
    if line.is_blocking or not refused or bundle.num_drops == num_drops:
        return answers
    with suppress(Reconnected):  # a caller that must look first does so before the next try
        again = await _execute(redis, [commands[place] for place in refused], may_send, timeout_s)
        for place, answer in zip(refused, again, strict=True):
            answers[place] = answer
    return answers


async def _execute(
    redis: Redis, commands: Sequence[Command], may_send: Callable[[], bool], timeout_s: float
) -> list[Any]:
    connection: Any = await redis.connection_pool.get_connection()
    if not may_send():
        await redis.connection_pool.release(connection)
        raise Reconnected
    bundle = line_of(redis).bundle()
    num_drops = bundle.num_drops
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange_hashed(functools.partial(_exchange, connection), commands)
    except BaseException as error:  # unread answers would be taken for those of the next commands
        await connection.disconnect(nowait=True)
        if isinstance(error, TimeoutError):  # Python's own, which is not a RedisError
            raise exceptions.TimeoutError(f"no answer within {timeout_s:g} s") from error
        check_kept(bundle, num_drops, error)
        raise
    finally:
        await redis.connection_pool.release(connection)


async def execute_one(redis: RedisClient, command: Command) -> Any:
    """Returns the server's answer to one command, using `execute`: a script is sent as its hash.

    Raises:
        RedisError, OSError: the server's error, or the connection failed and the command may have been executed.
    """
    [answer] = await execute(redis, [command])
    if isinstance(answer, Exception):
        raise answer
    return answer


Exchange: TypeAlias = Callable[[Sequence[Command]], Awaitable[list[Any]]]


async def _exchange_hashed(exchange: Exchange, commands: Sequence[Command]) -> list[Any]:
    answers = await exchange([_hashed(command) for command in commands])
    unknown = [place for place, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]
    if unknown:
        whole = await exchange([commands[place] for place in unknown])
        for place, answer in zip(unknown, whole, strict=True):
            answers[place] = answer
    return answers


async def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    if not commands:  # Python 3.12's asyncio tries forever to write nothing, and such a connection cannot be closed
        return []
    await connection.send_packed_command([b"".join([pack_command(cast("Any", command)) for command in commands])])
    return [await _read(connection) for _ in commands]


async def _read(connection: Any) -> Any:
    try:
        # one timer for all answers is cheaper than one for each
        return await connection.read_response(timeout=math.inf)
    except exceptions.ResponseError as error:
        return error


async def _exchange_with_cluster(redis: RedisCluster, commands: Sequence[Command]) -> list[Any]:
    if len(commands) == 1:  # the library's pipeline closes everybody's connections when a node is lost
        try:
            return [await redis.execute_command(*commands[0])]
        except exceptions.ResponseError as error:
            return [error]
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return await pipeline.execute(raise_on_error=False)


_HASHED: Mapping[str | bytes | int, str] = {"EVAL": "EVALSHA", "EVAL_RO": "EVALSHA_RO"}


def _hashed(command: Command) -> Command:
    hashed = _HASHED.get(command[0])
    return command if hashed is None else (hashed, script_hash(str(command[1])), *command[2:])


@functools.cache  # there are two dozen scripts
def script_hash(source: str) -> str:
    """Returns the hash by which EVALSHA names a script."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class Batcher:
    """Combines commands that tasks of one event loop send at about the same time into one pipeline.

    A command waits for the next pass of the event loop, so that those of one pass go together. While `MAX_PIPELINES`
    are in flight, new commands wait and go together as well. Under Redis Cluster each command is sent by itself, as its
    keys decide where.

    Args:
        redis: the client to send with.
        retries: how often a pipeline is resent whole after its connection broke; above 0 only for commands that may run
            twice. If no connection can be had, retrying is up to `redis`.
    """

    def __init__(self, redis: RedisClient, *, retries: int) -> None:
        self._redis = redis
        self._retries = retries
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._is_about_to_send = False

    async def execute(self, *command: str | bytes | int) -> Any:
        """Returns the server's answer to one command, unconverted. If the call is cancelled, the command may still be
        sent.

        Raises:
            RedisError, OSError: the server's error, or the connection failed and the command may have been executed.
        """
        if not isinstance(self._redis, Redis):
            return await execute_one(self._redis, command)
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
        """Ends what is under way, and cancels callers that wait for it."""
        await end_tasks(self._senders)
        self._is_about_to_send = False
        while self._waiting:  # a sender that had not begun ends without notice
            self._waiting.popleft()[1].cancel()

    async def _send(self) -> None:
        self._is_about_to_send = False
        while batch := self._take():
            try:
                answers = await self._try([command for command, _ in batch])
            except Exception as error:  # the callers must learn of it
                answers = [error] * len(batch)
            except BaseException:
                for _, answer in batch:
                    answer.cancel()
                raise
            for (_, answer), value in zip(batch, answers, strict=True):
                if answer.done():  # the caller has gone
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
            command, answer = self._waiting.popleft()
            if answer.done():  # the caller has gone
                continue
            batch.append((command, answer))
            num_bytes += sum(len(part) for part in command if not isinstance(part, int))
        return batch
