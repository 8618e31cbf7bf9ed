"""The server programs at hand, and how three servers become a cluster."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import pytest
from redis import Redis as BlockingRedis

from penstock.local.embedded import EmbeddedServer, find_servers
from tests.support.patience import WAIT_S

SERVERS = find_servers()
KINDS: list[Any] = [
    pytest.param(name, marks=[pytest.mark.other_server] if place else []) for place, name in enumerate(SERVERS)
] or ["none"]
"""Kinds of servers: the `params` of a fixture that starts one."""


def cluster_arguments() -> tuple[str, ...]:
    """Returns options of a cluster node; its bus would by default use a port 10000 higher, which may not exist."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bus_port = probe.getsockname()[1]
    return ("--cluster-enabled", "yes", "--cluster-port", str(bus_port), "--cluster-node-timeout", "5000")


def form_cluster(servers: list[EmbeddedServer]) -> None:
    """Divides the slots and waits until all nodes agree."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(BlockingRedis.from_url(server.url, protocol=2)) for server in servers]
        bounds = [16_384 * place // len(nodes) for place in range(len(nodes) + 1)]
        for node, first, end in zip(nodes, bounds, bounds[1:], strict=False):
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        for server, bus in [(server, server_bus_port(node)) for server, node in zip(servers, nodes, strict=True)][1:]:
            nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        deadline = time.monotonic() + WAIT_S
        while not all(is_whole(node, len(nodes)) for node in nodes):
            assert time.monotonic() < deadline, "the nodes did not form a cluster in time"
            time.sleep(0.02)


def server_bus_port(node: BlockingRedis) -> int:
    return int(str(node.config_get("cluster-port")["cluster-port"]))


def is_whole(node: BlockingRedis, num_nodes: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(num_nodes))
