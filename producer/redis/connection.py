"""Connections to Redis, for the client library and for the worker, and the quirks of the Redis library in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeAlias

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, ConnectionPool, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from penstock.producer import keys
from penstock.producer.errors import ConnectionLost, PenstockError, ServerRefused
from penstock.producer.redis.address import Address, check_files, parse_url
from penstock.producer.redis.credentials import Credentials
from penstock.producer.redis.faults import (
    UNREACHABLE,
    Meaning,
    is_away,
    is_junk,
    may_be_elsewhere,
    may_pass,
    meaning_of,
)
from penstock.producer.redis.moves import Line, Parser, check_kept, line_of, nodes_of
from penstock.producer.redis.silence import Watched
from penstock.producer.redis.tls import Renewed

RedisClient: TypeAlias = Redis | RedisCluster
Fields: TypeAlias = dict[bytes, bytes]

_log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 2.0  # for one of them: there are others
BACKOFF = ExponentialWithJitterBackoff(base=0.05, cap=1.0)


def connect(url: str | Address, *, decode: bool, retries: int = 3, name: str | None = None) -> RedisClient:
    """Makes a client for the deployment that `url` names (see `address.parse_url`); it connects on first use.

    A command is tried up to `retries` times more when the connection fails or no answer comes within 10 s, so it may
    run twice: send only what may (scripts that deduplicate, XADD with an explicit id, reads).

    Args:
        url: where Redis is.
        decode: whether answers are `str` (True) or `bytes`.
        retries: how often a command is tried again.
        name: shown by CLIENT LIST, where the server takes names.

    Raises:
        BadAddress: the URL can't be used.
    """
    redis = _client(url, decode_responses=decode, retry=Retry(BACKOFF, retries), socket_timeout=COMMAND_TIMEOUT_S)
    return redis if name is None else _named(redis, name)


def connect_blocking(url: str | Address, *, decode: bool, block_s: float, name: str | None = None) -> RedisClient:
    """Makes a client for one caller's blocking reads of at most `block_s` seconds each.

    Nothing is ever sent twice, as a repeated XREADGROUP would leave the lost answer's entries pending and unseen; and
    the socket waits for longer than the server blocks.

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

    A cancellation that the library swallowed (`end_tasks` says how) takes effect at the end of the block.

    Raises:
        ConnectionLost: the server can't be reached, does not answer, or is no Redis.
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
        raise ServerRefused(f"Redis at {address}: a key of Penstock's holds what is no text", is_junk=True) from error


def as_ours(error: Exception, address: Address) -> ConnectionLost | ServerRefused:
    """Our error for one of the Redis library's, which names the server."""
    if isinstance(error, exceptions.InvalidResponse):
        return ConnectionLost(f"no connection to Redis at {address}: what answers there is not Redis: {error}")
    if is_away(error):
        return ConnectionLost(f"no connection to Redis at {address}: {error}")
    refused = f"Redis at {address} refused: {error}"
    return ServerRefused(refused, is_passing=may_pass(error), is_junk=is_junk(error))


@asynccontextmanager
async def answered(address: Address, within_s: float | None) -> AsyncIterator[None]:
    """`redis_errors`, where the block may take so long; None: as long as the library tries.

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
    """Has `hook` called for each connection that `redis` makes from now on, before anything but the greeting is sent.

    If it raises a ConnectionError, the connection is not used.
    """

    async def call(_connection: Any) -> None:
        await hook()

    _greet(redis, call)


def _greet(redis: RedisClient, more: Callable[[Any], Awaitable[None]]) -> None:
    """Has `more` called with each new connection, after what was asked for earlier."""
    kinds = _options_of(redis)
    before = kinds[0].get("redis_connect_func")

    async def greet(connection: Any) -> None:
        await (connection.on_connect() if before is None else before(connection))
        await more(connection)

    for kwargs in kinds:
        kwargs["redis_connect_func"] = greet


def _options_of(redis: RedisClient) -> list[dict[str, Any]]:
    """What connections are made with from now on."""
    if isinstance(redis, Redis):
        return [redis.connection_pool.connection_kwargs]
    # nodes found later are made with the client's own
    return [redis.connection_kwargs, *(node.connection_kwargs for node in redis.startup_nodes)]


def _named(redis: RedisClient, name: str) -> RedisClient:
    """With names for its connections, which some servers and proxies refuse, and which nothing needs."""

    async def tell(connection: Any) -> None:
        await connection.send_command("CLIENT", "SETNAME", name, check_health=False)
        try:
            await connection.read_response()
        except exceptions.ResponseError as error:
            _say_nameless(str(error))

    _greet(redis, tell)
    return redis


_is_looking_up: ContextVar[bool] = ContextVar("_is_looking_up", default=False)


def is_looking_up() -> bool:
    """Whether this is within a cluster client's look at the topology, for which all its other commands wait."""
    return _is_looking_up.get()


def renew_connections(redis: RedisClient) -> None:
    """Has every connection there is made anew, at the latest after its next command, and greeted as of then."""
    if isinstance(redis, Redis):
        pool = redis.connection_pool
        connections = (*pool._available_connections, *pool._in_use_connections)  # noqa: SLF001
    else:
        connections = tuple(each for node in redis.get_nodes() for each in node._connections)  # noqa: SLF001
    for connection in connections:
        connection.mark_for_reconnect()  # type: ignore[no-untyped-call]


@cache
def _say_nameless(why: str) -> None:
    """Once in a process."""
    _log.info("Redis takes no names of connections, so CLIENT LIST shows none: %s", why)


async def ensure_group(redis: RedisClient, queue: str) -> None:
    """Creates the consumer group of `queue` at entry 0, so that it sees what was queued before; fine if it exists."""
    await make_group(redis, keys.requests(queue))


async def make_group(redis: RedisClient, stream: str) -> None:
    """Creates the group of workers on a stream, at its first entry; fine if it exists."""
    try:
        await redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
    except exceptions.ResponseError as error:
        if meaning_of(error) is not Meaning.GROUP_EXISTS:
            raise


def _client(url: str | Address, block_s: float | None = None, **common: Any) -> RedisClient:
    address = parse_url(url) if isinstance(url, str) else url
    check_files(address)
    redis = _made(address, block_s or 0.0, common)
    line = Line(str(address), is_of_nodes=address.kind == "cluster", is_blocking=block_s is not None)
    line.lead(redis)
    for options in _options_of(redis):
        options.update(line=line, parser_class=Parser)
    return redis


def _made(address: Address, block_s: float, common: dict[str, Any]) -> RedisClient:
    # Without driver info no CLIENT SETINFO is sent, which an ACL file that Redis 7.0 is to load cannot allow.
    options: dict[str, Any] = {"protocol": 2, "driver_info": None, **address.options, **common}
    options.update(_login(address))
    if address.kind == "unix":
        return _Redis.from_pool(_Pool(connection_class=_UnixConnection, path=address.path, db=address.db, **options))
    options["socket_connect_timeout"] = CONNECT_TIMEOUT_S
    watched: dict[str, Any] = {"deployment": str(address), "block_s": block_s}
    if address.kind == "cluster":
        return _Cluster.of(address, options, watched)
    if address.kind == "sentinel":
        return _SentinelRedis.through(address, {**options, **watched, "db": address.db})
    host, port = address.hosts[0]
    kind = _TlsConnection if address.tls else _Connection
    pool = _Pool(connection_class=kind, host=host, port=port, db=address.db, **options, **watched)
    return _Redis.from_pool(pool)


def _login(address: Address, *, is_sentinel: bool = False) -> dict[str, Any]:
    if address.read_anew is not None:
        return {"credential_provider": Credentials(address, is_sentinel=is_sentinel)}
    if is_sentinel:
        return {"username": address.sentinel_username, "password": address.sentinel_password}
    return {"username": address.username, "password": address.password}


class _Lean(AbstractConnection):
    """What makes a command of redis-py's asyncio half as cheap as one of its blocking half; and one of a `Bundle`.

    Attributes:
        age: the bundle's, when the connection was last made.
    """

    def __init__(self, *, line: Line, **options: Any) -> None:
        super().__init__(**options)
        self.line = line
        self.age = 0

    async def _connect(self) -> None:
        self.age = self.line.bundle(self).age  # before the name is resolved
        await super()._connect()  # type: ignore[no-untyped-call, safe-super]

    def pack_command(self, *args: Any) -> list[bytes]:
        """Packs in C. In Python, an XREAD of 64 streams takes longer to pack than to answer."""
        return [pack_command((*args[0].split(), *args[1:]))]  # the library passes "XGROUP CREATE" as one argument

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Hands a command over to the socket at once, if it takes all of it: then there is nothing to wait for.

        The library waits for every command in a task of its own, up to Python 3.11.
        """
        if self._writer is not None and not isinstance(command, bytes | str):
            self._writer.writelines(command)
            if not self._writer.transport.get_write_buffer_size():
                return
            command = ()  # what is left of it is waited for below
        await super().send_packed_command(command, check_health)


class _UnixConnection(_Lean, UnixDomainSocketConnection): ...


class _Connection(_Lean, Watched):
    def __init__(self, *, line: Line, **options: Any) -> None:
        super().__init__(line=line, **options)
        self._made_with["line"] = line  # for another one like it


class _TlsConnection(_Connection, Renewed): ...


class _SentinelConnection(_Connection, SentinelManagedConnection): ...


class _SentinelTlsConnection(_Connection, Renewed, SentinelManagedSSLConnection): ...


class _ToSentinel(Watched):
    line = None  # what a sentinel says of itself moves nobody


class _ToSentinelByTls(_ToSentinel, Renewed): ...


class _Pool(ConnectionPool):
    """Takes and returns connections without what the library counts for OpenTelemetry, nearly half of a command's cost.

    Nothing is awaited between a look at the connections and a change to them, so there is nothing to lock.
    """

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> AbstractConnection:
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if connection.should_reconnect():  # type: ignore[no-untyped-call]
                await connection.disconnect(nowait=True)
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        if connection.should_reconnect():  # type: ignore[no-untyped-call]
            await connection.disconnect()
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)


class _SentinelPool(_Pool, SentinelConnectionPool): ...


class _Redis(Redis):
    """A client that sends a command again whose connection led to a server that takes none, and that has another now.

    Such a command was not executed. Blocking reads are not sent again: whoever reads has to look first what the other
    server lacks.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        line = line_of(self)
        bundle = line.bundle()
        num_drops = bundle.num_drops
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except exceptions.ResponseError as error:
            if line.is_blocking or not may_be_elsewhere(error) or bundle.num_drops == num_drops:
                raise
        except exceptions.ConnectionError as error:
            check_kept(bundle, num_drops, error)
            raise
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class _Cluster(RedisCluster):
    """A cluster client that may be used by many tasks at once.

    As the library has it, commands that come before the first look at the topology go to random nodes; five
    redirections close the connections that other tasks use (`reinitialize_steps` is 0 to avoid it); and so does a
    connection that breaks, in a way that those tasks see an AttributeError instead of something that is tried again.
    """

    @classmethod
    def of(cls, address: Address, options: dict[str, Any], watched: dict[str, Any]) -> _Cluster:
        """With `_Lean` connections, which are made with `watched` too."""
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        client = cls(startup_nodes=nodes, ssl=address.tls, reinitialize_steps=0, **options)
        kind = _TlsConnection if address.tls else _Connection
        client.connection_kwargs.update({**watched, "connection_class": kind})  # of nodes found later
        for node in client.startup_nodes:
            node.connection_class = kind
            node.connection_kwargs.update(watched)
        return client

    async def aclose(self) -> None:
        """Closes all connections. The library forgets those that it has made to the nodes that were named at first, and
        closes none when the topology is to be looked at anew.
        """
        nodes = nodes_of(self)
        await super().aclose()
        for node in nodes:
            await node.disconnect()

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        token = _is_looking_up.set(True)
        try:
            return await super().initialize(*args, **kwargs)
        finally:
            _is_looking_up.reset(token)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        await self.initialize()
        return await super().execute_command(*args, **kwargs)

    async def _execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute_command(*args, **kwargs)
        except AttributeError as error:
            raise exceptions.ConnectionError(f"the connection was closed meanwhile: {error}") from error


class _SentinelRedis(_Redis):
    """A client of the service's current master that also closes its connections to the sentinels."""

    _manager: Sentinel

    @classmethod
    def through(cls, address: Address, options: dict[str, Any]) -> _SentinelRedis:
        kind = _SentinelTlsConnection if address.tls else _SentinelConnection
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        to_master = {name: value for name, value in options.items() if address.tls or name not in tls}
        to_sentinels = {
            **(tls if address.sentinel_tls else {}),
            **_login(address, is_sentinel=True),
            "deployment": options["deployment"],
            "max_idle_s": 0.0,  # they are asked when something has broken, which may have broken these connections too
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        }
        to_one = _ToSentinelByTls if address.sentinel_tls else _ToSentinel
        manager = Sentinel([])  # type: ignore[no-untyped-call]
        manager.sentinels = [
            Redis.from_pool(_Pool(connection_class=to_one, host=host, port=port, **to_sentinels))
            for host, port in address.hosts
        ]
        client: _SentinelRedis = manager.master_for(
            address.service, cls, connection_pool_class=_SentinelPool, connection_class=kind, **to_master
        )
        client._manager = manager
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self._manager.aclose()
