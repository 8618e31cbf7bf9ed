"""What the handlers of one gateway process share, and who asks them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from starlette.requests import HTTPConnection

from penstock.gateway.abandonment.watch import Watch
from penstock.gateway.directory import Directory
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.keys.keeper import Keeper
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.standing import Standing
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.gateway.store.records import Records
from penstock.producer import AsyncClient


@dataclass(frozen=True, slots=True)
class Gateway:
    """One process's. `client` is of no queue in particular: `client.on(queue)` is. `store` is for the gateway's own.
    `has_batch_news` is set where somebody has made or cancelled a batch.
    """

    settings: GatewaySettings
    client: AsyncClient
    directory: Directory
    store: Store
    interruptions: Interruptions
    keeper: Keeper
    ledger: Ledger
    records: Records
    watch: Watch
    has_batch_news: asyncio.Event
    standing: Standing


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. Where no API keys exist, everybody is the same caller, without a key."""

    key_id: str | None = None
    tenant: str | None = None
    models: frozenset[str] | None = None  # names of models and queues that it may use; None: all
    is_admin: bool = False  # whether it may look after queues

    @property
    def owner(self) -> str:
        """What is kept beside what this caller has stored."""
        return self.key_id or ""


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The process's; its directory has what the caller may use."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)  # noqa: S101  the application's lifespan has set it
    models = caller_of(connection).models
    return gateway if models is None else replace(gateway, directory=gateway.directory.limited_to(models))


def caller_of(connection: HTTPConnection) -> Caller:
    caller = getattr(connection.state, "caller", None) or Caller()
    assert isinstance(caller, Caller)  # noqa: S101  who checks keys has set it
    return caller
