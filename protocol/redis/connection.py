"""Creates Redis clients for the client library and for the worker, and translates their errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, PenstockError, ServerRefused
from penstock.protocol.redis.address import Address, check_files, parse_url
from penstock.protocol.redis.clients import made
from penstock.protocol.redis.faults import UNREACHABLE, Meaning, is_away, is_junk, may_pass, meaning_of
from penstock.protocol.redis.moves import Parser, RedisEndpoint, connections_of

RedisClient: TypeAlias = Redis | RedisCluster
Fields: TypeAlias = dict[bytes, bytes]

_log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 10.0
BACKOFF = ExponentialWithJitterBackoff(base=0.05, cap=1.0)


def connect(url: str | Address, *, decode: bool, retries: int = 3, name: str | None = None) -> RedisClient:
    """Creates a client for the deployment that `url` names (see `address.parse_url`); it connects on first use.

    A command is retried up to `retries` times when the connection fails or no answer comes within 10 s. It may
    therefore run twice: send only commands for which that is safe (scripts that deduplicate, XADD with an explicit id,
    reads).

    Args:
        url: where Redis is.
        decode: whether answers are `str` (True) or `bytes`.
        retries: how often a command is retried.
        name: shown by CLIENT LIST, where the server takes names.

    Raises:
        BadAddress: the URL can't be used.
    """
    redis = _client(url, decode_responses=decode, retry=Retry(BACKOFF, retries), socket_timeout=COMMAND_TIMEOUT_S)
    return redis if name is None else _named(redis, name)


def connect_blocking(url: str | Address, *, decode: bool, block_s: float, name: str | None = None) -> RedisClient:
    """Creates a client for one caller's blocking reads of at most `block_s` seconds each.

    Nothing is ever sent twice, as a repeated XREADGROUP would leave the lost answer's entries pending and unseen. The
    socket waits for longer than the server blocks.

    Raises:
        BadAddress: the URL can't be used.
    """
    timeout_s = block_s + COMMAND_TIMEOUT_S
    retry = Retry(NoBackoff(), 0)
    redis = _client(url, block_s, decode_responses=decode, retry=retry, socket_timeout=timeout_s)
    return redis if name is None else _named(redis, name)


@contextmanager
def redis_errors(address: Address) -> Iterator[None]:
    """Turns the Redis library's exceptions into ours, naming the server but not the credentials.

    A cancellation that the library swallowed (see `end_tasks`) takes effect at the end of the block.

    Raises:
        ConnectionLost: the server can't be reached, does not answer, or is not Redis.
        ServerRefused: the server answered with an error.
    """
    task = asyncio.current_task()
    num_cancels = task.cancelling() if task else 0
    try:
        yield
        if task and task.cancelling() > num_cancels:
            raise asyncio.CancelledError
    except PenstockError:
        raise
    except (exceptions.RedisError, *UNREACHABLE) as error:
        raise as_ours(error, address) from error
    except UnicodeDecodeError as error:
        raise ServerRefused(f"Redis at {address}: a key of Penstock's does not hold text", is_junk=True) from error


def as_ours(error: Exception, address: Address) -> ConnectionLost | ServerRefused:
    """Returns our error for one of the Redis library's. It names the server."""
    if isinstance(error, exceptions.InvalidResponse):
        return ConnectionLost(f"no connection to Redis at {address}: what answers there is not Redis: {error}")
    if is_away(error):
        return ConnectionLost(f"no connection to Redis at {address}: {error}")
    refused = f"Redis at {address} refused: {error}"
    return ServerRefused(refused, is_passing=may_pass(error), is_junk=is_junk(error))


@asynccontextmanager
async def answered(address: Address, within_s: float | None) -> AsyncIterator[None]:
    """Wraps `redis_errors` around a block that may take `within_s`; None: as long as the library tries.

    Raises:
        As `redis_errors`.
    """
    with redis_errors(address):
        try:
            async with asyncio.timeout(within_s) as limit:
                yield
        except TimeoutError as error:
            if limit.expired():
                raise exceptions.TimeoutError(f"no answer within {within_s:g} s") from error
            raise


def on_new_connections(redis: RedisClient, hook: Callable[[], Awaitable[None]]) -> None:
    """Calls `hook` for each connection that `redis` makes from now on, after the greeting and before anything else is
    sent.

    If it raises a ConnectionError, the connection is not used.
    """

    async def call(_connection: Any) -> None:
        await hook()

    _greet(redis, call)


def _greet(redis: RedisClient, more: Callable[[Any], Awaitable[None]]) -> None:
    """Calls `more` with each new connection, after the hooks added earlier."""
    kinds = _options_of(redis)
    before = kinds[0].get("redis_connect_func")

    async def greet(connection: Any) -> None:
        await (connection.on_connect() if before is None else before(connection))
        await more(connection)

    for kwargs in kinds:
        kwargs["redis_connect_func"] = greet


def _options_of(redis: RedisClient) -> list[dict[str, Any]]:
    """Returns the options of all connections made from now on."""
    if isinstance(redis, Redis):
        return [redis.connection_pool.connection_kwargs]
    # nodes found later use the client's own
    return [redis.connection_kwargs, *(node.connection_kwargs for node in redis.startup_nodes)]


def _named(redis: RedisClient, name: str) -> RedisClient:
    """Names a client's connections. Some servers and proxies refuse names, and nothing needs them."""

    async def tell(connection: Any) -> None:
        await connection.send_command("CLIENT", "SETNAME", name, check_health=False)
        try:
            await connection.read_response()
        except exceptions.ResponseError as error:
            _say_nameless(str(error))

    _greet(redis, tell)
    return redis


def renew_connections(redis: RedisClient) -> None:
    """Replaces every existing connection, at the latest after its next command. New ones get the hooks set by then."""
    for connection, _ in connections_of(redis):
        connection.mark_for_reconnect()


@cache
def _say_nameless(why: str) -> None:
    """Logs once in a process that the server takes no names."""
    _log.info("Redis does not accept names of connections, so CLIENT LIST shows none: %s", why)


async def ensure_group(redis: RedisClient, queue: str) -> None:
    """Creates the consumer group of `queue` at entry 0, so that it sees what was queued before. No error if it
    exists.
    """
    await make_group(redis, keys.requests(queue))


async def make_group(redis: RedisClient, stream: str) -> None:
    """Creates the group of workers on a stream, at its first entry. No error if it exists."""
    try:
        await redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    except exceptions.ResponseError as error:
        if meaning_of(error) is not Meaning.GROUP_EXISTS:
            raise


def _client(url: str | Address, block_s: float | None = None, **common: Any) -> RedisClient:
    address = parse_url(url) if isinstance(url, str) else url
    check_files(address)
    redis = made(address, block_s or 0.0, common)
    line = RedisEndpoint(str(address), is_of_nodes=address.kind == "cluster", is_blocking=block_s is not None)
    line.lead(redis)
    for options in _options_of(redis):
        options.update(line=line, parser_class=Parser)
    return redis
