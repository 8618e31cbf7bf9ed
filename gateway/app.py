"""The ASGI application: which path leads where, and what every request has in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway import health
from penstock.gateway.abandonment.watch import Watch
from penstock.gateway.context import Gateway
from penstock.gateway.directory import Directory
from penstock.gateway.errors import ApiError, api_error
from penstock.gateway.http.disconnect import ClientGone
from penstock.gateway.http.interruptions import Interruptions
from penstock.gateway.http.observing import CLIENT_CLOSED_REQUEST, Observing
from penstock.gateway.keys.guard import KeyGuard
from penstock.gateway.metrics import Metrics
from penstock.gateway.openai.chat import create_chat_completion
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store.connection import Store
from penstock.producer import AsyncClient, PenstockError


def create_app(settings: GatewaySettings, metrics: Metrics | None = None) -> Starlette:
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
            app.state.gateway = Gateway(settings, client, directory, store, Interruptions(), watch)
            yield

    routes = [
        *health.ROUTES,
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    ]
    handlers = {
        ApiError: _answer_api_error,
        PenstockError: _answer_penstock_error,
        HTTPException: _answer_http_exception,
        ClientGone: _answer_nobody,
        ClientDisconnect: _answer_nobody,
    }
    middleware = [
        Middleware(Observing, metrics=metrics or Metrics()),
        *_cors(settings),
        Middleware(KeyGuard),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False  # the redirection would name the host that the client named
    return app


def _cors(settings: GatewaySettings) -> Iterator[Middleware]:
    """What pages from elsewhere may ask; keys are sent in headers, never as cookies."""
    if settings.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )


_CODES = {404: "not_found", 405: "method_not_allowed"}


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
    answer = _answer(ApiError(error.status_code, message, code=_CODES.get(error.status_code)))
    answer.headers.update(error.headers or {})
    return answer


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
