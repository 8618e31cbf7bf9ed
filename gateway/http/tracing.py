"""Makes a span of each HTTP request, as part of the client's trace. It says nothing of a body.

Names and attributes follow the conventions for HTTP servers: `POST /v1/chat/completions`, with route, status and the
error's code.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.semconv.attributes.url_attributes import URL_PATH, URL_SCHEME
from opentelemetry.trace import Span, SpanKind, TracerProvider
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.http.carried_trace import TRACE_STATE, carried_trace
from penstock.gateway.http.observing import METHODS, PROBES
from penstock.protocol.telemetry.recorder import SpanRecorder, context_of, headers_of

OTHER_METHOD = "_OTHER"
"""The conventions' name for a method that is not a known one."""


class Tracing:
    """Wraps everything else, so that a span ends with the answer, even if that is a stream.

    Args:
        app: the application that it wraps.
        provider: receives the spans.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._recorder = SpanRecorder(provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        span, status = self._start(scope), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._end(scope, span, status)

    def _start(self, scope: Scope) -> Span:
        trace = carried_trace(Headers(scope=scope))
        method = _method(scope)
        said = {HTTP_REQUEST_METHOD: method, URL_SCHEME: scope["scheme"], URL_PATH: scope["path"][:200]}
        parent = context_of(trace.get("traceparent"), trace.get("tracestate")) or Context()
        span = self._recorder.start("HTTP" if method == OTHER_METHOD else method, SpanKind.SERVER, parent, said)
        scope.setdefault("state", {})[TRACE_STATE] = headers_of(span)
        return span

    def _end(self, scope: Scope, span: Span, status: int) -> None:
        route = getattr(scope.get("route"), "path", None)
        said: dict[str, str | int] = {}
        if status:
            said[HTTP_RESPONSE_STATUS_CODE] = status
        if route is not None:
            said[HTTP_ROUTE] = route
            with self._recorder.harmless:
                span.update_name(f"{_method(scope)} {route}")
        self._recorder.end(span, said, error=_error(scope, status))


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else OTHER_METHOD


def _error(scope: Scope, status: int) -> str | None:
    """Returns the error. Only failures of the server count, not clients' mistakes."""
    if not status:
        return "client_gone"
    return str(scope["state"].get("error_code") or status) if status >= 500 else None
