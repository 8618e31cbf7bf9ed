"""What the handlers of one gateway process share, and who asks them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from penstock.gateway.abandonment.watch import Watch
from penstock.gateway.directory import Directory
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient
from penstock.producer.redis.connection import RedisClient


@dataclass(frozen=True, slots=True)
class Gateway:
    """One process's. `client` is of no queue in particular: `client.on(queue)` is. `store` is for the gateway's own."""

    settings: GatewaySettings
    client: AsyncClient
    directory: Directory
    store: Store
    interruptions: Interruptions
    watch: Watch

    @property
    def redis(self) -> RedisClient:
        return self.store.redis


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. Where no API keys exist, everybody is the same caller, without a key."""

    key_id: str | None = None
    tenant: str | None = None
    models: frozenset[str] | None = None  # names of models and queues that it may use; None: all


def gateway_of(connection: HTTPConnection) -> Gateway:
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)  # noqa: S101  the application's lifespan has set it
    return gateway


def caller_of(connection: HTTPConnection) -> Caller:
    caller = getattr(connection.state, "caller", None) or Caller()
    assert isinstance(caller, Caller)  # noqa: S101  who checks keys has set it
    return caller
