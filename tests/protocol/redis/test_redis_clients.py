"""Clients of the Redis library, made our way, leave no connection open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio.cluster import ClusterNode

from penstock.protocol.redis.connection import connect
from penstock.protocol.redis.moves import connections_of
from tests.support.patience import WAIT_S

Open = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class SlowOpening:
    """Stands in for `asyncio.open_connection`, and waits until `may_end` is set."""

    def __init__(self, open_connection: Open) -> None:
        self._open = open_connection
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.made: list[asyncio.StreamWriter] = []

    async def __call__(self, *args: Any, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.has_begun.set()
        await self.may_end.wait()
        reader, writer = await self._open(*args, **kwargs)
        self.made.append(writer)
        return reader, writer


async def test_what_is_being_made_while_the_client_is_closed_is_closed_too(
    redis_url: str, redis_cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in (redis_url, redis_cluster_url):
        client: Any = connect(url, decode=False, retries=0)
        await client.get("k")
        for connection, _ in connections_of(client):
            await connection.disconnect()
        opening = SlowOpening(asyncio.open_connection)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_connection", opening)
            asking = asyncio.create_task(client.get("k"))
            async with asyncio.timeout(WAIT_S):
                await opening.has_begun.wait()
                await client.aclose()
                opening.may_end.set()
                with pytest.raises(exceptions.ConnectionError, match="closed while it was made"):
                    await asking
        assert [each.transport.is_closing() for each in opening.made] == [True]


async def test_no_connection_stays_to_a_node_that_has_left_the_cluster(redis_cluster_url: str) -> None:
    """A caller that chose the node before the topology was looked at still asks it."""
    client: Any = connect(redis_cluster_url, decode=False)
    await client.initialize()
    chosen = client.get_node_from_key("k")
    of_same_name = ClusterNode(chosen.host, chosen.port, **client.connection_kwargs)
    try:
        assert await client.execute_command("PING", target_nodes=of_same_name)
        assert [each.is_connected for each in of_same_name._connections] == [False]
        assert await client.execute_command("PING", target_nodes=chosen)
        assert [each.is_connected for each in chosen._connections][-1:] == [True]
    finally:
        await client.aclose()
