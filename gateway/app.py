"""The ASGI application: which path leads where, and what every request has in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.abandonment.watch import Watch
from penstock.gateway.context import Gateway
from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError, api_error
from penstock.gateway.http.disconnect import ClientGone
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.keys.guard import KeyGuard
from penstock.gateway.openai.routes import ROUTES as OPENAI_ROUTES
from penstock.gateway.responses.routes import ROUTES as RESPONSES_ROUTES
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store.connection import Store
from penstock.gateway.store.ledger import Ledger
from penstock.gateway.store.records import Records
from penstock.producer import AsyncClient, PenstockError

CLIENT_CLOSED_REQUEST = 499
"""Nobody receives it; logs and metrics show it."""


def create_app(settings: GatewaySettings) -> Starlette:
    """The application. Its connections to Redis live from its start to its end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client = AsyncClient(settings.redis_url, max_queue_length=settings.max_queue_length)
        async with (
            client,
            Store(settings.redis_url) as store,
            Watch(store, client, settings.abandon_after_s) as watch,
        ):
            directory = Directory(client, settings.queues)
            ledger = Ledger(store, max_share=settings.max_store_share, max_bytes=settings.max_store_bytes)
            records = Records(store, ledger)
            app.state.gateway = Gateway(settings, client, directory, store, Interruptions(), records, watch)
            yield

    routes = [*OPENAI_ROUTES, *RESPONSES_ROUTES]
    handlers = {
        ApiError: _answer_api_error,
        PenstockError: _answer_penstock_error,
        HTTPException: _answer_http_exception,
        ClientGone: _answer_nobody,
    }
    middleware = [Middleware(KeyGuard)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  as it is registered
    return _answer(error)


async def _answer_penstock_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)  # noqa: S101  as it is registered
    return _answer(api_error(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette itself says no to: a path or a method that is not there."""
    assert isinstance(error, HTTPException)  # noqa: S101  as it is registered
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _answer(ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
