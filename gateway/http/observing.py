"""Reports every request, to its client and to the operator, without prompts and replies."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.http.answers import error_response
from penstock.gateway.http.unexpected import internal_error, log_unexpected
from penstock.gateway.metrics import GatewayMetrics

_log = structlog.get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Nobody receives this status; logs and metrics show it."""

PROBES = frozenset({"/liveness", "/readiness", "/health"})
"""Routes that report the process's health. They are polled often, so they are logged as debug; they need no key, and
have reserved connections.
"""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"


class Observing:
    """Gives each answer an `x-request-id`, the client's own if it sent one, and `openai-processing-ms`; logs and counts
    it. Unexpected errors of handlers end here: with a 500, and their location in the log.

    Args:
        app: the application that it wraps.
        metrics: the process's.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        with self._metrics.open_requests.track_inprogress():
            try:
                await self._app(scope, receive, answer.send)
            except Exception as error:
                log_unexpected("request_failed", error, request_id=answer.request_id)
                await answer.fail(receive)
            finally:
                self._record(scope, answer)

    def _record(self, scope: Scope, answer: _Answer) -> None:
        now_s = time.perf_counter()
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = getattr(scope.get("route"), "path", _NO_ROUTE)
        labels = (method, route)
        self._metrics.requests.labels(*labels, str(answer.status)).inc()
        if (code := scope["state"].get("error_code")) is not None:
            self._metrics.count_error(route, code)
        if (sent_to := scope["state"].get("sent_to")) is not None:
            queue, model = sent_to
            self._metrics.count_generation(queue, model, answer.status)
        self._metrics.first_byte_seconds.labels(*labels).observe((answer.begun_s or now_s) - answer.asked_s)
        self._metrics.request_seconds.labels(*labels).observe(now_s - answer.asked_s)
        log = _log.debug if route in PROBES else _log.info
        caller = scope.get("state", {}).get("caller")
        log(
            "request",
            request_id=answer.request_id,
            client=scope["client"][0] if scope.get("client") else None,
            key=caller and caller.key_id,
            tenant=caller and caller.tenant,
            method=method,
            path=scope["path"][:200],
            status=answer.status,
            ms=round(1000 * (now_s - answer.asked_s), 1),
            num_bytes=answer.num_bytes,
        )


@dataclass(slots=True)
class _Answer:
    """State of an answer."""

    scope: Scope
    to_client: Send
    asked_s: float = field(default_factory=time.perf_counter)
    begun_s: float | None = None
    status: int = CLIENT_CLOSED_REQUEST
    num_bytes: int = 0
    request_id: str = ""

    def __post_init__(self) -> None:
        self.request_id = _given_id(self.scope) or f"req_{secrets.token_hex(16)}"
        self.scope.setdefault("state", {})["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun_s = time.perf_counter()
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = self.request_id  # the second is Anthropic's name
            headers["openai-processing-ms"] = str(round(1000 * (self.begun_s - self.asked_s)))
        else:
            self.num_bytes += len(message.get("body", b""))
        await self.to_client(message)

    async def fail(self, receive: Receive) -> None:
        """Answers with an error. An answer that has begun is left without an end instead: the server closes the
        connection, and the client sees that something is missing.
        """
        if self.begun_s is None:
            await error_response(internal_error(), self.scope)(self.scope, receive, self.send)


def _given_id(scope: Scope) -> str | None:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else None
