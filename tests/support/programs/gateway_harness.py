"""Runs a gateway in the test's own event loop, on its own port."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.gateway.directory import Directory
from penstock.gateway.keys.records import ApiKey
from penstock.gateway.keys.secrets import Secret, new_secret
from penstock.gateway.keys.store import KeyStore
from penstock.gateway.server import GatewayServer
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.standing import RedisHealth
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient, ModelCard
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry

CARD = ModelCard(model="tiny", worker="scripted", version="0", vocab_size=256, max_model_len=4096)
FAR_AHEAD_MS = 2**52


MAX_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class Listening:
    """Something that takes HTTP on this machine."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Running(Listening):
    server: GatewayServer


@asynccontextmanager
async def running_gateway(
    redis_url: str,
    *,
    max_connections: int = MAX_CONNECTIONS,
    telemetry: Telemetry | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Serves until the end of the block, then waits until the gateway has stopped, which cuts short what is
    still open.
    """
    made = GatewaySettings(redis_url=redis_url, **{"drain_timeout_s": 0.1, "redis_timeout_s": WAIT_S, **settings})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = GatewayServer(made, max_connections, telemetry)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await eventually(lambda: server.started or serving.done())
            yield Running(listener.getsockname()[1], server)
        finally:
            if not server.should_exit:
                server.stop()
            await serving


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate of its own authority, for 127.0.0.1."""

    file: Path
    key: Path

    @classmethod
    def made_in(cls, folder: Path) -> Certificate:
        made = cls(folder / "cert.pem", folder / "key.pem")
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
            "-addext subjectAltName=IP:127.0.0.1"
        )
        subprocess.run([*command.split(), "-out", made.file, "-keyout", made.key], check=True, capture_output=True)
        return made

    def trusted(self) -> ssl.SSLContext:
        """TLS context of a client that trusts the certificate."""
        return ssl.create_default_context(cafile=str(self.file))


async def announce(redis: RedisClient, queue: str = "default", card: ModelCard = CARD) -> None:
    """Writes what the workers of a queue would: its card, and its place among the queues."""
    fields: Any = card.to_fields()
    await redis.hset(keys.card(queue), mapping=fields)
    await redis.zadd(keys.queues(), {queue: FAR_AHEAD_MS})


def standing_with(store: Store) -> RedisHealth:
    """Returns the Redis state that parts of a gateway report, where nobody asks for it."""
    return RedisHealth(store, Directory(AsyncClient(store.address)), (), refused_drain_after_s=300.0)


async def new_key(redis_url: str, *, expires_in_s: float | None = None, **fields: Any) -> Secret:
    """Creates an API key, as `penstock keys create` does."""
    secret = new_secret()
    async with Store(redis_url) as store:
        there = KeyStore(store.execute)
        now_ms = (await there.find(secret.key_id)).now_ms
        expires_ms = None if expires_in_s is None else now_ms + round(expires_in_s * 1000)
        values = {"name": secret.key_id, "created_ms": now_ms, "expires_ms": expires_ms, **fields}
        await there.add(ApiKey.model_validate({"id": secret.key_id, "digest": secret.digest, **values}))
    return secret


async def revoke(redis_url: str, secret: Secret) -> None:
    async with Store(redis_url) as store:
        assert await KeyStore(store.execute).revoke(secret.key_id)
