"""When a name, a sentinel or a cluster leads to another server by now: connections to the old one are dropped.

A managed Redis fails over by moving its name. Connections stay open to the demoted primary, which says READONLY to
writes, or loads what the new primary has, or waits for it. Nothing else tells a client that the name leads elsewhere.
So what one connection is told counts for all that lead to the same place: each is closed, and made anew when it is next
used, for which the name is resolved again. A read that blocks, which the old server may keep waiting, is cut.
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

from penstock.producer.redis.faults import Dropped, may_be_elsewhere

EVERY_S = 0.5
"""Of a server that stays read-only, connections are made anew no more often than that."""

BLOCK_S = 1.0
"""For how long whoever only reads waits at the server: then it asks again whether that takes writes (`Witness`)."""

WITNESS_EVERY_S = 0.9


class Bundle:
    """All connections of one event loop that lead to one server, or to the name of one.

    Attributes:
        age: a connection notes it before it resolves the name. What is younger than the last that was told of a demoted
            server may lead to another one.
        num_drops: how often all that were older were dropped.
        reason: what the server said the last time.
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
        """The server of `connection` takes no writes. Of many that are told so at once, one has all of them dropped."""
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
    """Now and then sends a write without effect with a blocking read, to be told whether the server takes any.

    A demoted server goes on answering reads, from what it has, or with nothing for ever.

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


class Line:
    """What each connection of a client knows of the client.

    Args:
        place: where it leads, as a URL.
        is_of_nodes: whether that is a cluster, each of whose nodes may move by itself.
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
        """That of `connection`, which the client's others share unless it is of a cluster."""
        place = f"{self._place} {connection.host}:{connection.port}" if self._is_of_nodes else self._place
        bundle = _bundles.setdefault(asyncio.get_running_loop(), {}).setdefault(place, Bundle())
        client = self._client()
        if client is not None:
            bundle.join(client)
        return bundle


class Parser(DefaultParser):  # type: ignore[misc, valid-type]
    """Hears of each error that the server answers, however deep in an answer, at no cost to all others."""

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


def line_of(redis: Redis) -> Line:
    """That of a client, which is of no cluster."""
    line: Line = redis.connection_pool.connection_kwargs["line"]
    return line


def check_kept(bundle: Bundle, num_drops: int, error: BaseException) -> None:
    """Raises Dropped where a connection that failed was cut here, as the bundle had not been dropped more often."""
    is_lost = isinstance(error, exceptions.ConnectionError) and not may_be_elsewhere(error)
    if is_lost and bundle.num_drops != num_drops:
        raise Dropped(str(bundle.reason)) from bundle.reason


def drop_connections(redis: Any, *, like: Any = None, below: float = math.inf) -> None:
    """Has every connection of a client made anew, with its name resolved anew, by its next use.

    One with a command under way is closed when the answer is there. A blocking read is cut at once: whoever reads sees
    a ConnectionError, unless the answer has come.

    Args:
        redis: the client.
        like: of a cluster's connections, those to the node of this one alone; None: all.
        below: those of a lower age alone.
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
    """Those of a client, and whether each is idle. `like`: of a cluster's, those to the node of this one alone."""
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
    """All that a client has connections to; several may be of one name."""
    nodes = (*redis.get_nodes(), *redis.startup_nodes, *redis.nodes_manager.startup_nodes.values())
    return list({id(node): node for node in nodes}.values())
