"""Undocumented parts of redis-py that we override or call: a new version of it must fail here first.

Each name says where we need it. When a test fails, look at what the library does now, then at ours, then at the pin in
pyproject.toml.
"""

from __future__ import annotations

import inspect
import tomllib
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, DefaultParser, SSLConnection

from penstock.protocol.redis import clients, moves, tls
from penstock.protocol.redis.connection import connect
from tests.support.packages import ROOT

pytestmark = pytest.mark.every_server

OVERRIDDEN = [
    (AbstractConnection, "pack_command", ["self", "*args"], clients._Lean),
    (AbstractConnection, "send_packed_command", ["self", "command", "check_health"], clients._Lean),
    (SSLConnection, "_connection_arguments", ["self"], tls.Renewed),
    (Redis, "execute_command", ["self", "*args", "**options"], clients._Redis),
    (Connection, "_connect", ["self"], clients._Lean),
    (
        AbstractConnection,
        "disconnect",
        ["self", "nowait", "error", "failure_count", "health_check_failed"],
        clients._Lean,
    ),
    (DefaultParser, "on_connect", ["self", "connection"], moves.Parser),
    (ConnectionPool, "get_connection", ["self", "command_name", "*keys", "**options"], clients._Pool),
    (ConnectionPool, "release", ["self", "connection"], clients._Pool),
    (RedisCluster, "_execute_command", ["self", "target_node", "*args", "**kwargs"], clients._Cluster),
    (RedisCluster, "execute_command", ["self", "*args", "**kwargs"], clients._Cluster),
    (RedisCluster, "aclose", ["self"], clients._Cluster),
]
CALLED = [
    (AbstractConnection, "on_connect", ["self"], True),  # connection.on_new_connections
    (AbstractConnection, "should_reconnect", ["self"], False),  # clients._Pool
    (AbstractConnection, "mark_for_reconnect", ["self"], False),  # moves.drop_connections
    (ClusterNode, "disconnect_if_needed", ["self", "connection"], True),  # moves.drop_connections: it reads the mark
    (AbstractConnection, "disconnect", ["self", "nowait"], True),  # clients._Pool, pipeline.execute
    (AbstractConnection, "read_response", ["self", "timeout"], True),  # pipeline.execute
    (ConnectionPool, "get_available_connection", ["self"], False),  # clients._Pool
    (ConnectionPool, "ensure_connection", ["self", "connection"], True),  # clients._Pool
    (RedisCluster, "initialize", ["self"], True),  # clients._Cluster, streams, durable
    (RedisCluster, "get_node_from_key", ["self", "key"], False),  # streams, durable
    (ClusterNode, "execute_command", ["self", "*args"], True),  # durable
    (ClusterNode, "execute_pipeline", ["self", "commands"], True),  # durable
    (ClusterNode, "disconnect", ["self"], True),  # clients._Cluster
    (ClusterNode, "disconnect_free_connections", ["self"], True),  # clients._Cluster
    (PipelineCommand, "__init__", ["self", "position", "*args"], False),  # durable
    (Sentinel, "master_for", ["self", "service_name", "redis_class", "**kwargs"], False),  # clients._SentinelRedis
    (Sentinel, "aclose", ["self"], True),  # clients._SentinelRedis
]


def parameters(function: Any) -> list[str]:
    """Returns the names of a function's parameters, with their stars if they have some."""
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(each.kind, "") + each.name for each in inspect.signature(function).parameters.values()]


def test_no_version_is_installed_that_these_tests_have_not_seen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    bounded = {requirement.split(">=")[0]: ",<" in requirement for requirement in asked}
    assert bounded["redis[hiredis]"]
    assert bounded["uvicorn"]


@pytest.mark.parametrize(("owner", "name", "expected", "ours"), OVERRIDDEN, ids=lambda value: str(value)[:40])
def test_what_is_overridden_is_there_and_takes_what_ours_takes(
    owner: type, name: str, expected: list[str], ours: type
) -> None:
    theirs, own = vars(owner)[name], vars(ours)[name]
    assert parameters(theirs) == expected
    assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(own)
    passed_on = any(parameter.startswith("*") for parameter in parameters(own))
    assert passed_on or parameters(own) == expected


@pytest.mark.parametrize(("owner", "name", "needed", "is_async"), CALLED, ids=lambda value: str(value)[:40])
def test_what_is_called_is_there(owner: type, name: str, needed: list[str], is_async: bool) -> None:
    function = getattr(owner, name)
    assert set(needed) <= set(parameters(function))
    assert inspect.iscoroutinefunction(function) == is_async


def test_a_pool_keeps_its_connections_where_ours_puts_them() -> None:
    pool = ConnectionPool(connection_class=Connection, redis_connect_func=None)
    made = pool.get_available_connection()
    assert (set(pool._in_use_connections), pool._available_connections) == ({made}, [])
    assert pool.connection_kwargs["redis_connect_func"] is None  # connection.on_new_connections sets it


async def test_connections_are_found_to_be_dropped(redis_url: str, redis_cluster_url: str) -> None:
    """Each is of a class that hears what the server answers."""
    for url in (redis_url, redis_cluster_url):
        client: Any = connect(url, decode=False)
        async with aclosing(client):
            await client.set("k", "v")
            found = list(moves.connections_of(client))
            assert any(idle and each.is_connected for each, idle in found)
            assert all(isinstance(each, clients._Lean) for each, _ in found)
            assert all(isinstance(each._parser, moves.Parser) for each, _ in found)


async def test_a_connection_writes_where_ours_does(redis_url: str) -> None:
    client: Any = connect(redis_url, decode=False)
    async with aclosing(client):
        made = await client.connection_pool.get_connection()
        assert made._writer.transport.get_write_buffer_size() == 0
        await client.connection_pool.release(made)
        await made.disconnect(nowait=True)
        assert made._writer is None


async def test_the_library_goes_through_what_is_overridden(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing called an override any more, nobody would notice."""
    called = count_calls(monkeypatch, clients._Lean, "pack_command", "send_packed_command")
    called_pool = count_calls(monkeypatch, clients._Pool, "get_connection", "release")
    async with aclosing(connect(redis_url, decode=False)) as client:
        await client.ping()
        called.clear()
        called_pool.clear()
        await client.ping()
    assert called == {"pack_command": 1, "send_packed_command": 1}
    assert called_pool == {"get_connection": 1, "release": 1}


async def test_a_cluster_client_goes_through_what_is_overridden(
    redis_cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = count_calls(monkeypatch, clients._Cluster, "execute_command", "_execute_command")
    client: Any = connect(redis_cluster_url, decode=False)
    async with aclosing(client):
        await client.set("k", "v")
        assert called == {"execute_command": 1, "_execute_command": 1}
        assert all(isinstance(node, ClusterNode) for node in client.startup_nodes)
        assert all(isinstance(node, ClusterNode) for node in client.nodes_manager.startup_nodes.values())
        assert "redis_connect_func" in {**client.connection_kwargs, "redis_connect_func": None}
        assert isinstance(client.get_node_from_key("k").connection_kwargs, dict)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Counter[str]:
    """Counts calls of methods, which still run."""
    called: Counter[str] = Counter()

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return method(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name, vars(owner)[name]))
    return called
