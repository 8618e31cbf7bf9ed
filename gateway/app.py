"""The ASGI application: routes, and what all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.gateway import health
from penstock.gateway.abandonment.readers import AbandonmentWatch
from penstock.gateway.admission.guard import KeyGuard
from penstock.gateway.admission.shares import Shares
from penstock.gateway.anthropic.errors import error_body
from penstock.gateway.anthropic.routes import PATH as ANTHROPIC_PATH
from penstock.gateway.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from penstock.gateway.batches.routes import ROUTES as BATCHES_ROUTES
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.context import Gateway, gateway_of
from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError
from penstock.gateway.files.routes import ROUTES as FILES_ROUTES
from penstock.gateway.http.addresses import networks
from penstock.gateway.http.answers import error_response
from penstock.gateway.http.body import BodyBudget
from penstock.gateway.http.disconnect import ClientGone
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.http.observing import CLIENT_CLOSED_REQUEST, Observing
from penstock.gateway.http.passed_over import NotesOnFields
from penstock.gateway.http.trailing_slashes import TrailingSlashes
from penstock.gateway.keys.manager import KeyManager
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openai.routes import ROUTES as OPENAI_ROUTES
from penstock.gateway.openai.unserved import ROUTES as UNSERVED_ROUTES
from penstock.gateway.openapi.routes import PAGE_ROUTES as DOCS_ROUTES
from penstock.gateway.openapi.routes import ROUTES as OPENAPI_ROUTES
from penstock.gateway.operations.queue_admin import QueueAdmin
from penstock.gateway.operations.routes import ROUTES as OPERATIONS_ROUTES
from penstock.gateway.page.routes import page_routes
from penstock.gateway.responses.routes import ROUTES as RESPONSES_ROUTES
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.standing import RedisHealth
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.gateway.store.records import Records
from penstock.producer import AsyncClient, PenstockError
from penstock.producer.aio import connections_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def create_app(
    settings: GatewaySettings,
    metrics: GatewayMetrics | None = None,
    provider: TracerProvider | None = None,
    max_connections: int | None = None,
) -> Starlette:
    """Creates the application. It connects to Redis at startup and closes the connections at shutdown.

    Args:
        settings: the gateway's settings.
        metrics: counters for its work.
        provider: receives spans; None: nothing is traced here, but clients' traces still continue in workers.
        max_connections: the server's limit on connections; None: the setting.
    """
    routes = [*health.ROUTES, *OPENAI_ROUTES, *UNSERVED_ROUTES]  # before routes whose parameter would match them
    routes += [*RESPONSES_ROUTES, *FILES_ROUTES, *BATCHES_ROUTES, *ANTHROPIC_ROUTES, *OPERATIONS_ROUTES]
    routes += OPENAPI_ROUTES
    routes += [*DOCS_ROUTES, *page_routes()] if settings.page else []
    middleware = [
        Middleware(TrailingSlashes),
        *_tracing(provider),
        Middleware(Observing, metrics=metrics or GatewayMetrics()),
        *_cors(settings),
        Middleware(KeyGuard),
        Middleware(NotesOnFields, is_strict=settings.strict_fields),
    ]
    app = Starlette(
        routes=routes,
        lifespan=partial(_connected, settings=settings, provider=provider),
        exception_handlers=_HANDLERS,
        middleware=middleware,
    )
    app.state.is_draining = False
    app.state.bodies = BodyBudget(settings.max_bodies_bytes)
    app.state.shares = Shares(max_connections or settings.max_connections)
    app.state.proxies = networks(settings.trusted_proxies)
    app.state.error_forms = {ANTHROPIC_PATH: error_body}
    app.router.redirect_slashes = False  # the redirect would use the host that the client named
    return app


@asynccontextmanager
async def _connected(
    app: Starlette, *, settings: GatewaySettings, provider: TracerProvider | None
) -> AsyncIterator[None]:
    """Holds what the application needs while it serves: connections, keys, tasks."""
    client = AsyncClient(
        settings.address(),
        max_queue_length=settings.max_queue_length,
        answer_timeout_s=settings.redis_timeout_s,
        tracing=provider or False,
    )
    directory, interruptions = Directory(client, settings.queues), Interruptions()
    operator_url = "redis_url" if settings.operator_redis_url is None else "operator_redis_url"
    async with (
        client,
        Store(settings.address(), answer_timeout_s=settings.redis_timeout_s) as store,
        Store(settings.address(operator_url), answer_timeout_s=settings.redis_timeout_s) as operator_store,
        _standing(settings, directory, client, store, operator_store) as standing,
        KeyManager(store, client, interruptions, standing, is_key_required=settings.require_key) as key_manager,
        AbandonmentWatch(store, client, standing, settings.abandon_after_s) as watch,
    ):
        ledger = Ledger(store, max_share=settings.max_store_share, max_bytes=settings.max_store_bytes)
        records, news = Records(store, ledger), asyncio.Event()
        app.state.queue_admin = QueueAdmin(operator_store, settings.queues)
        app.state.gateway = gateway = Gateway(
            settings, client, directory, store, interruptions, key_manager, ledger, records, watch, news, standing
        )
        async with BatchRunner(gateway):
            yield


def _standing(
    settings: GatewaySettings, directory: Directory, client: AsyncClient, store: Store, operator_store: Store
) -> RedisHealth:
    """Watches the process's connections, except the operator's, whose user has its own password."""
    connections = connections_of(client)
    clients = [*connections.clients, store.redis]
    if settings.operator_redis_url is None:
        clients.append(operator_store.redis)
    standing = RedisHealth(store, directory, clients, settings.refused_drain_after_s)
    connections.reader.hear = standing.hear
    return standing


def _tracing(provider: TracerProvider | None) -> Iterator[Middleware]:
    if provider is not None:
        from penstock.gateway.http.tracing import Tracing  # needs the extra `otel`

        yield Middleware(Tracing, provider=provider)


def _cors(settings: GatewaySettings) -> Iterator[Middleware]:
    """Yields the CORS middleware for other sites' pages; keys are sent in headers, never as cookies."""
    if settings.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  as it is registered
    return error_response(error, request.scope)


async def _answer_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)  # noqa: S101  as it is registered
    return error_response(gateway_of(request).standing.told(error), request.scope)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers Starlette's own errors: a path or a method that does not exist."""
    assert isinstance(error, HTTPException)  # noqa: S101  as it is registered
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    refusal = ApiError(error.status_code, message, code=_CODES.get(error.status_code))
    answer = error_response(refusal, request.scope)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


_HANDLERS = {
    ApiError: _answer_api_error,
    PenstockError: _answer_penstock_error,
    HTTPException: _answer_http_exception,
    ClientGone: _answer_nobody,
    ClientDisconnect: _answer_nobody,
}
