"""Middleware before every handler: identifies the caller, checks its limits, and prepares the answer's interruption."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.admission.admission import RequestAdmission, headers_of
from penstock.gateway.admission.request_ids import joined_id
from penstock.gateway.admission.shares import Shares
from penstock.gateway.context import Caller, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.addresses import client_network
from penstock.gateway.http.answers import error_response
from penstock.gateway.http.interruptions import Interruption, Interruptions
from penstock.gateway.http.observing import PROBES
from penstock.gateway.keys.cache import Presented, expired
from penstock.gateway.keys.limits import OverLimit
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.page import routes as page
from penstock.producer import PenstockError

OPEN_PATHS = page.PATHS | page.MADE_PATHS | PROBES
"""Paths answered without a key: pages, which are the same for everybody, and probes."""


class KeyGuard:
    """Sets the caller of each request (`caller_of`), its admission and its interruption (`interruption_of`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            try:
                presented = await _presented(HTTPConnection(scope))
                held.enter_context(_share(HTTPConnection(scope), presented))
                admission = await _admission(scope, presented)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
            except PenstockError as error:
                await _refuse(gateway_of(HTTPConnection(scope)).standing.told(error), scope, receive, send)
            else:
                await self._answer(presented, admission, scope, receive, send)

    async def _answer(
        self, presented: Presented | None, admission: RequestAdmission, scope: Scope, receive: Receive, send: Send
    ) -> None:
        connection = HTTPConnection(scope)
        try:
            with _opened(gateway_of(connection).interruptions, presented) as interruption:
                connection.state.caller = _caller(presented)
                connection.state.interruption = interruption
                connection.state.admission = admission
                await self._app(scope, receive, _finishing(send, admission) if admission.is_limited else send)
        finally:
            await admission.finish()


async def _presented(connection: HTTPConnection) -> Presented | None:
    if connection.scope["path"] in OPEN_PATHS:  # not `url.path`, which depends on headers too
        return None
    return await gateway_of(connection).key_manager.cache.check(_sent_key(connection))


def _sent_key(connection: HTTPConnection) -> str | None:
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return connection.headers.get("x-api-key")


def _share(connection: HTTPConnection, presented: Presented | None) -> AbstractContextManager[None]:
    """Takes a share of the connections for the key, or for the address if there is no key."""
    if connection.scope["path"] in OPEN_PATHS:
        return nullcontext()
    shares: Shares = connection.app.state.shares
    client = client_network(connection, connection.app.state.proxies) if presented is None else presented.key.id
    return shares.taken(client)


async def _admission(scope: Scope, presented: Presented | None) -> RequestAdmission:
    """Admits a request. Limits apply only to requests that cause work: a client at its limit may still look and
    cancel.
    """
    if presented is None or presented.key.limits == KeyLimits() or not _makes_work(scope):
        return RequestAdmission()
    connection, key = HTTPConnection(scope), presented.key
    key_manager = gateway_of(connection).key_manager
    lease = await key_manager.limiter.admit(key.id, key.limits, joined_id(connection, key.id))
    return RequestAdmission(key_manager, key.limits, lease)


def _makes_work(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] == "POST" and not path.endswith("/cancel") and not path.startswith("/operations/")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error, scope)
    if isinstance(error, OverLimit):
        response.headers.update(headers_of("requests", error.usage))
    await response(scope, receive, send)


def _finishing(send: Send, admission: RequestAdmission) -> Send:
    """Adds headers about the remaining limits, and sends the end of the body only after all limits are released."""

    async def send_and_finish(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(admission.headers)
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            await admission.finish()
        await send(message)

    return send_and_finish


def _caller(presented: Presented | None) -> Caller:
    if presented is None:
        return Caller()
    key = presented.key
    return Caller(key_id=key.id, tenant=key.tenant, models=key.models, is_admin=key.admin)


@contextmanager
def _opened(interruptions: Interruptions, presented: Presented | None) -> Iterator[Interruption]:
    if presented is None:
        with interruptions.opened() as interruption:
            yield interruption
        return
    key_id = presented.key.id
    with interruptions.opened(key_id) as interruption:
        if presented.expires_in_s is None:
            yield interruption
            return
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(presented.expires_in_s, interruption.end, expired(key_id))
        try:
            yield interruption
        finally:
            expiry.cancel()
