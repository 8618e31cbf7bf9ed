"""The worker's HTTP port: /healthz for liveness, /readyz for readiness with the reasons, /metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import structlog

from penstock.serving.http.guard import GuardedServer, PortLimits
from penstock.serving.listening import listen
from penstock.serving.readiness import Readiness

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

Scrape: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]

_log = structlog.get_logger(__name__)
_JSON = "application/json"

_PROBES = frozenset({"/healthz", "/readyz"})

LIMITS = PortLimits(max_connections=64, probes=_PROBES, header_timeout_s=5.0, body_timeout_s=5.0, answer_timeout_s=10.0)
"""Limits of scrapes; probes come on top. The worker needs its file descriptors itself."""


class HealthApp:
    """An ASGI application. It shows no prompts and no addresses.

    Args:
        readiness: whether the worker can serve, and if not, why.
        is_alive: whether the process is worth keeping; false once the engine's thread has ended.
        scrape: makes the metrics page and its content type, from an Accept header.
    """

    def __init__(self, readiness: Readiness, is_alive: Callable[[], bool], scrape: Scrape) -> None:
        self._readiness = readiness
        self._is_alive = is_alive
        self._scrape = scrape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = await self._answer(scope["method"], scope["path"], _accept(scope))
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, method: str, path: str, accept: str) -> tuple[int, str, bytes]:
        if method not in ("GET", "HEAD"):
            return 405, _JSON, _json({"error": f"{method} is not allowed"})
        if path == "/healthz":
            alive = self._is_alive()
            return (200 if alive else 503), _JSON, _json({"alive": alive})
        if path == "/readyz":
            ready = self._readiness.is_ready
            return (200 if ready else 503), _JSON, _json({"ready": ready, "reasons": dict(self._readiness.reasons)})
        if path == "/metrics":
            page, content_type = await self._scrape(accept)
            return 200, content_type, page
        return 404, _JSON, _json({"error": f"there is no {path}: /healthz, /readyz, /metrics"})


class HealthServer:
    """Serves a `HealthApp` from the running event loop, between `start` and `stop`."""

    def __init__(self, app: HealthApp, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server = _Server(
            app,
            LIMITS,
            log_config=None,
            log_level="error",  # at `warning`, a stranger could fill the log with malformed requests
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that the server listens on, once started."""
        return self._port

    async def start(self) -> None:
        """Starts to listen.

        Raises:
            OSError: the address can't be listened on.
        """
        listener = listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="health")
        _log.info("health_listening", host=self._host, port=self._port)

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


class _Server(GuardedServer):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals of the process to the worker."""
        yield


def _accept(scope: Scope) -> str:
    return b",".join(value for name, value in scope.get("headers", ()) if name == b"accept").decode("latin-1")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
