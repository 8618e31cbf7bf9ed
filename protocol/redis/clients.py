"""The Redis library's clients and connections as we use them: leaner, watched, and without some of its quirks."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, ConnectionPool, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff

from penstock.protocol.redis.address import Address
from penstock.protocol.redis.credentials import Credentials
from penstock.protocol.redis.faults import may_be_elsewhere
from penstock.protocol.redis.moves import RedisEndpoint, check_kept, line_of, nodes_of
from penstock.protocol.redis.silence import Watched
from penstock.protocol.redis.tls import Renewed

CONNECT_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 2.0  # for one sentinel; the next is asked then

_is_looking_up: ContextVar[bool] = ContextVar("_is_looking_up", default=False)


def is_looking_up() -> bool:
    """Whether the caller is within a cluster client's topology lookup, which all its other commands wait for."""
    return _is_looking_up.get()


def made(address: Address, block_s: float, common: dict[str, Any]) -> Redis | RedisCluster:
    """Creates a client of the kind that `address` asks for.

    Args:
        address: where Redis is.
        block_s: how long the server may leave a read unanswered.
        common: options of its connections, as the library has them.
    """
    # Without driver info no CLIENT SETINFO is sent, which an ACL file for Redis 7.0 cannot allow.
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
    """Makes redis-py's asyncio commands as cheap as its blocking ones, and adds the connection to a
    `Bundle`.

    Attributes:
        age: the bundle's age when the connection was last made.
    """

    def __init__(self, *, line: RedisEndpoint, **options: Any) -> None:
        super().__init__(**options)
        self.line = line
        self.age = 0
        self._num_closings = 0

    async def _connect(self) -> None:
        self.age = self.line.bundle(self).age  # before the name is resolved
        num_closings = self._num_closings
        await super()._connect()  # type: ignore[no-untyped-call, safe-super]
        if self._num_closings != num_closings:  # its client was closed, and nobody would close this connection any more
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError("the connection was closed while it was made")

    async def disconnect(self, nowait: bool = False, *args: Any, **kwargs: Any) -> None:
        self._num_closings += 1
        await super().disconnect(nowait, *args, **kwargs)

    def pack_command(self, *args: Any) -> list[bytes]:
        """Packs in C. In Python, packing an XREAD of 64 streams takes longer than the answer."""
        return [pack_command((*args[0].split(), *args[1:]))]  # the library passes "XGROUP CREATE" as one argument

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Passes a command to the socket at once. If that takes all of it, there is nothing to wait for.

        Up to Python 3.11 the library waits for every command in a task of its own.
        """
        if self._writer is not None and not isinstance(command, bytes | str):
            self._writer.writelines(command)
            if not self._writer.transport.get_write_buffer_size():
                return
            command = ()  # the rest of it is awaited below
        await super().send_packed_command(command, check_health)


class _UnixConnection(_Lean, UnixDomainSocketConnection): ...


class _Connection(_Lean, Watched):
    def __init__(self, *, line: RedisEndpoint, **options: Any) -> None:
        super().__init__(line=line, **options)
        self._made_with["line"] = line  # for another one like it


class _TlsConnection(_Connection, Renewed): ...


class _SentinelConnection(_Connection, SentinelManagedConnection): ...


class _SentinelTlsConnection(_Connection, Renewed, SentinelManagedSSLConnection): ...


class _ToSentinel(Watched):
    line = None  # an error from a sentinel must not drop connections to the server


class _ToSentinelByTls(_ToSentinel, Renewed): ...


class _Pool(ConnectionPool):
    """Takes and returns connections without the library's OpenTelemetry counters, nearly half of a command's cost.

    Nothing is awaited between a look at the connections and a change to them, so there is nothing to lock.
    """

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> AbstractConnection:
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if connection.should_reconnect():
                await connection.disconnect(nowait=True)
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        if connection.should_reconnect():
            await connection.disconnect()
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)


class _SentinelPool(_Pool, SentinelConnectionPool): ...


class _Redis(Redis):
    """A client that resends a command after its server turned out to take none and the connection was replaced.

    Such a command was not executed. Blocking reads are not resent: the reader must first check what the other server
    lacks.
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

    In the library, commands that come before the first topology lookup go to random nodes. Five redirections close the
    connections that other tasks use (`reinitialize_steps` is 0 to avoid it). So does a connection that breaks: those
    tasks then see an AttributeError instead of an error that is retried.
    """

    @classmethod
    def of(cls, address: Address, options: dict[str, Any], watched: dict[str, Any]) -> _Cluster:
        """Creates a client with `_Lean` connections, whose options include `watched`."""
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        client = cls(startup_nodes=nodes, ssl=address.tls, reinitialize_steps=0, **options)
        kind = _TlsConnection if address.tls else _Connection
        client.connection_kwargs.update({**watched, "connection_class": kind})  # for nodes found later
        for node in client.startup_nodes:
            node.connection_class = kind
            node.connection_kwargs.update(watched)
        return client

    async def aclose(self) -> None:
        """Closes all connections. The library forgets those to the nodes named at first, and closes none when a
        topology lookup is due.
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

    async def _execute_command(self, target_node: ClusterNode, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute_command(target_node, *args, **kwargs)
        except AttributeError as error:
            raise exceptions.ConnectionError(f"the connection was closed meanwhile: {error}") from error
        finally:
            if self.nodes_manager.nodes_cache.get(target_node.name) is not target_node:
                await target_node.disconnect_free_connections()  # it has left the cluster: nobody else knows of them


class _SentinelRedis(_Redis):
    """A client of the service's current master, which also closes its connections to the sentinels."""

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
            "max_idle_s": 0.0,  # sentinels are asked after a failure, which may have broken these connections too
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        }
        to_one = _ToSentinelByTls if address.sentinel_tls else _ToSentinel
        manager = Sentinel([])
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
