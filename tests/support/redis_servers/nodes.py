"""Deployments of several servers: a sentinel, which leads clients to a server, and the nodes of a cluster."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from redis.asyncio import Redis

from penstock.local.embedded import EmbeddedServer
from tests.support.patience import WAIT_S, eventually
from tests.support.redis_servers.forwarding import Forwarding
from tests.support.redis_servers.servers import SERVERS

Proxy = TypeVar("Proxy", bound=Forwarding)


@contextmanager
def sentinel(folder: Path, master_port: int) -> Iterator[int]:
    """Runs a sentinel that watches `service`; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\ndir {folder}\nsentinel monitor service 127.0.0.1 {master_port} 1\n"
        "sentinel down-after-milliseconds service 60000\n"
    )
    process = subprocess.Popen(
        [str(next(iter(SERVERS.values()))), str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_S)


@asynccontextmanager
async def proxied_nodes(
    servers: list[EmbeddedServer], kind: Callable[[str], AbstractAsyncContextManager[Proxy]]
) -> AsyncIterator[tuple[str, list[Proxy]]]:
    """Puts a proxy before each node of a cluster, and has nodes name the proxies to clients; gives the
    cluster's URL.
    """
    async with AsyncExitStack() as stack:
        proxies: list[Proxy] = [await stack.enter_async_context(kind(server.url)) for server in servers]
        nodes = [await stack.enter_async_context(Redis.from_url(server.url)) for server in servers]
        try:
            for node, proxy in zip(nodes, proxies, strict=True):
                await node.config_set("cluster-announce-port", proxy.port)
            for node in nodes:
                await eventually(lambda: _named(node, {proxy.port for proxy in proxies}))  # noqa: B023
            yield "redis+cluster://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies), proxies
        finally:
            for node in nodes:
                await node.config_set("cluster-announce-port", 0)
            for node in nodes:
                await eventually(lambda: _named(node, {server.port for server in servers}))  # noqa: B023


async def _named(node: Redis, ports: set[int]) -> bool:
    slots = await node.execute_command("CLUSTER SLOTS")
    return {entry[2][1] for entry in slots} == ports
