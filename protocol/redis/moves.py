"""Drops connections to the old server once a name, a sentinel or a cluster leads to another one.

A managed Redis fails over by moving its name. Connections stay open to the demoted primary. It answers READONLY to
writes, or loads the new primary's data, or waits for it. Nothing else tells a client that the name leads elsewhere. So
what one connection hears counts for all that lead to the same place: each is closed and opened again at its next use,
which resolves the name again. A blocking read, which the old server may keep waiting, is cut.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import DefaultParser

from penstock.protocol.redis.faults import Dropped, may_be_elsewhere

EVERY_S = 0.5
"""Shortest time between two renewals of the connections to a server that stays read-only."""

BLOCK_S = 1.0
"""Longest that a blocking read waits before it is checked again that the server takes writes (`Witness`)."""

WITNESS_EVERY_S = 0.9


class Bundle:
    """All connections of one event loop that lead to one server, or to the name of one.

    Attributes:
        age: raised when a connection hits a demoted server. A connection notes it before it resolves the name: one that
            noted a later age may lead to another server.
        num_drops: how often all older connections were dropped.
        reason: the server's last error of this kind.
    """

    def __init__(self) -> None:
        self.age = self.num_drops = 0
        self.reason: Exception | None = None
        self._clients: WeakSet[Any] = WeakSet()
        self._dropped_s = -math.inf
        self._is_due = False

    def join(self, client: Any) -> None:
        self._clients.add(client)

    def told(self, connection: Any, reason: Exception) -> None:
        """Notes that the server of `connection` takes no writes. If many report it at once, only one drops all of
        them.
        """
        if connection.age != self.age:
            return
        self.age += 1
        self.reason = reason
        if self._is_due:
            return
        wait_s = self._dropped_s + EVERY_S - time.monotonic()
        if wait_s <= 0:
            self._drop(connection)
        else:
            self._is_due = True
            asyncio.get_running_loop().call_later(wait_s, self._drop, connection)

    def _drop(self, told: Any) -> None:
        self._is_due = False
        self.num_drops += 1
        self._dropped_s = time.monotonic()
        for client in self._clients:
            drop_connections(client, like=told, below=self.age)


class Witness:
    """Now and then adds a write without effect to a blocking read, to learn whether the server takes any.

    A demoted server goes on answering reads, with its old data or forever with nothing.

    Args:
        command: the write, which the user may not be allowed to send: nothing depends on its answer.
    """

    def __init__(self, *command: str | int) -> None:
        self._command = command
        self._sent_s = -math.inf

    def due(self) -> tuple[str | int, ...] | None:
        now = time.monotonic()
        if now - self._sent_s < WITNESS_EVERY_S:
            return None
        self._sent_s = now
        return self._command


_bundles: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Bundle]] = WeakKeyDictionary()


class RedisEndpoint:
    """What all connections of one client share.

    Args:
        place: where the client leads, as a URL.
        is_of_nodes: whether it leads to a cluster, where each node may move by itself.
        is_blocking: whether its connections are for reads that wait at the server.
    """

    def __init__(self, place: str, *, is_of_nodes: bool, is_blocking: bool) -> None:
        self._place = place
        self._is_of_nodes = is_of_nodes
        self.is_blocking = is_blocking
        self._client: Callable[[], Any] = lambda: None

    def lead(self, client: Any) -> None:
        self._client = ref(client)

    def bundle(self, connection: Any = None) -> Bundle:
        """Returns the bundle of `connection`. All connections of a client share one, except in a cluster."""
        place = f"{self._place} {connection.host}:{connection.port}" if self._is_of_nodes else self._place
        bundle = _bundles.setdefault(asyncio.get_running_loop(), {}).setdefault(place, Bundle())
        client = self._client()
        if client is not None:
            bundle.join(client)
        return bundle


class Parser(DefaultParser):  # type: ignore[misc, valid-type]
    """Hears of each error in the server's answers, however deeply nested, at no cost to other answers."""

    def on_connect(self, connection: Any) -> None:
        parse, listener = BaseParser.parse_error, ref(connection)

        def heed(text: str) -> Exception:
            error: Exception = parse(text)  # type: ignore[no-untyped-call]
            asking = listener()
            if asking is not None and asking.line is not None and may_be_elsewhere(error):
                asking.line.bundle(asking).told(asking, error)
            return error

        self.parse_error = heed
        super().on_connect(connection)


def line_of(redis: Redis) -> RedisEndpoint:
    """Returns the endpoint of a client that is not a cluster's."""
    line: RedisEndpoint = redis.connection_pool.connection_kwargs["line"]
    return line


def check_kept(bundle: Bundle, num_drops: int, error: BaseException) -> None:
    """Raises Dropped if a failed connection was cut here, and not by the server: the bundle was dropped again
    meanwhile.
    """
    is_lost = isinstance(error, exceptions.ConnectionError) and not may_be_elsewhere(error)
    if is_lost and bundle.num_drops != num_drops:
        raise Dropped(str(bundle.reason)) from bundle.reason


def drop_connections(redis: Any, *, like: Any = None, below: float = math.inf) -> None:
    """Makes every connection of a client reconnect by its next use, with its name resolved again.

    A connection with a command under way is closed after the answer. A blocking read is cut at once: the reader sees a
    ConnectionError, unless the answer has come.

    Args:
        redis: the client.
        like: limits a cluster's connections to those to the node of this one; None: all.
        below: limits connections to those of a lower age.
    """
    if not isinstance(redis, Redis):
        redis._initialize = True  # noqa: SLF001  the topology is looked at before the next command
    for connection, is_idle in connections_of(redis, like):
        if connection.age >= below:
            continue
        connection.mark_for_reconnect()
        writer = connection._writer  # noqa: SLF001
        if writer is not None and (is_idle or connection.line.is_blocking):
            writer.transport.abort()


def connections_of(redis: Any, like: Any = None) -> Iterator[tuple[Any, bool]]:
    """Yields the connections of a client, and whether each is idle. `like` limits a cluster's to those to its node."""
    if isinstance(redis, Redis):
        pool = redis.connection_pool
        yield from ((each, True) for each in pool._available_connections)  # noqa: SLF001
        yield from ((each, False) for each in pool._in_use_connections)  # noqa: SLF001
        return
    for node in nodes_of(redis):
        if like is None or (node.host, node.port) == (like.host, like.port):
            idle = set(node._free)  # noqa: SLF001
            yield from ((each, each in idle) for each in node._connections)  # noqa: SLF001


def nodes_of(redis: RedisCluster) -> list[ClusterNode]:
    """Returns all nodes that a client has connections to; several may share a name."""
    nodes = (*redis.get_nodes(), *redis.startup_nodes, *redis.nodes_manager.startup_nodes.values())
    return list({id(node): node for node in nodes}.values())
