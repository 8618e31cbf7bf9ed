"""State shared by the handlers of one gateway process, and the caller of a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from starlette.requests import HTTPConnection

from penstock.gateway.abandonment.readers import AbandonmentWatch
from penstock.gateway.directory import Directory
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.keys.manager import KeyManager
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.standing import RedisHealth
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.gateway.store.records import Records
from penstock.producer import AsyncClient


@dataclass(frozen=True, slots=True)
class Gateway:
    """State of one process. `client` has no queue of its own; use `client.on(queue)`. `store` is for the gateway's own
    data. `has_batch_news` is set when somebody has made or cancelled a batch.
    """

    settings: GatewaySettings
    client: AsyncClient
    directory: Directory
    store: Store
    interruptions: Interruptions
    key_manager: KeyManager
    ledger: Ledger
    records: Records
    watch: AbandonmentWatch
    has_batch_news: asyncio.Event
    standing: RedisHealth


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller. If no API keys exist, everybody is the same caller, without a key."""

    key_id: str | None = None
    tenant: str | None = None
    models: frozenset[str] | None = None  # models and queues that it may use, by name; None: all
    is_admin: bool = False  # whether it may use the operators' routes

    @property
    def owner(self) -> str:
        """Owner of what this caller stores, as kept beside it."""
        return self.key_id or ""


def gateway_of(connection: HTTPConnection) -> Gateway:
    """Returns the process's gateway, with a directory limited to what the caller may use."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)  # noqa: S101  the application's lifespan has set it
    models = caller_of(connection).models
    return gateway if models is None else replace(gateway, directory=gateway.directory.limited_to(models))


def caller_of(connection: HTTPConnection) -> Caller:
    caller = getattr(connection.state, "caller", None) or Caller()
    assert isinstance(caller, Caller)  # noqa: S101  the key check has set it
    return caller
