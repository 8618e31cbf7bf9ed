"""HTTP servers of one process: the application's, and the one for its metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway import health
from penstock.gateway.app import create_app
from penstock.gateway.context import Gateway
from penstock.gateway.errors import ApiError
from penstock.gateway.http.observing import PROBES
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import GatewaySettings
from penstock.producer import PenstockError
from penstock.protocol.redis import tls
from penstock.protocol.redis.renewal import keep_looking
from penstock.protocol.tasks import end_tasks
from penstock.serving.exposition import render
from penstock.serving.http.certificate import certificate_of
from penstock.serving.http.guard import GuardedServer, PortLimits

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry

_log = structlog.get_logger(__name__)

METRICS_LIMITS = PortLimits(
    max_connections=16, probes=PROBES, header_timeout_s=5.0, body_timeout_s=5.0, answer_timeout_s=10.0
)
"""Limits for scrapes; probes come in addition."""

SCRAPE_TIMEOUT_S = 1.0
"""How long a scrape waits for Redis."""

END_S = 5.0
"""How long streams may take to send their last event at the end of a drain."""

STOPPING = ApiError(
    503,
    "this gateway stops before the answer is complete; send the request again: a stream with the same Idempotency-Key, "
    "and with the last event id as Last-Event-ID, goes on where it was",
    type="server_error",
    code="gateway_stopping",
    retry_after_s=1,
)


class _Server(GuardedServer):
    """A server that leaves the process's signals to others."""

    def __init__(self, app: Any, limits: PortLimits, **options: Any) -> None:
        super().__init__(
            app,
            limits,
            log_config=None,
            log_level="error",  # a warning for each malformed request would let a stranger fill the log
            access_log=False,
            server_header=False,
            proxy_headers=False,  # any client could claim to be somebody else
            **options,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(_Server):
    """Serves the application until `stop` or `drain`, then drains for `drain_timeout_s`.

    Args:
        settings: the gateway's settings.
        max_connections: the limit on connections.
        telemetry: receives traces; None: there are none.

    Attributes:
        is_refused: whether it ends because Redis refused for too long.
    """

    def __init__(self, settings: GatewaySettings, max_connections: int, telemetry: Telemetry | None = None) -> None:
        self.metrics = GatewayMetrics()
        provider = None if telemetry is None else telemetry.provider
        self.app = create_app(settings, self.metrics, provider, max_connections)
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self._is_told = False  # whether its owner has told it to stop
        self._is_over = False  # whether it has ended, with all connections to Redis closed
        self.is_refused = False
        self._certificate = certificate = certificate_of(settings.tls_certificate, settings.tls_key)
        super().__init__(
            self.app,
            _limits(settings, max_connections),
            lifespan="on",
            timeout_graceful_shutdown=settings.drain_timeout_s + END_S,
            ssl_context_factory=None if certificate is None else lambda *_: certificate.value,
        )
        places = self.config.places
        self.metrics.watch_connections(lambda: len(self.server_state.connections), lambda: places.num_turned_away)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:  # it could not start
            return
        self._tasks.append(asyncio.create_task(self._drain_once_refused()))
        self._tasks.append(asyncio.create_task(keep_looking(self._renew)))
        self._tasks.append(asyncio.create_task(self._look_for_keys()))

    async def _drain_once_refused(self) -> None:
        """Drains when Redis has refused for too long: the supervisor must see that the process cannot go on."""
        await self.app.state.gateway.standing.must_drain.wait()
        self.is_refused = True
        self.drain()

    async def _look_for_keys(self) -> None:
        """Warns if there are no API keys. A process that has seen a key always requires one, whatever happens to
        Redis.
        """
        try:
            caller = await self.app.state.gateway.key_manager.cache.check(None)
        except ApiError:
            return  # there are keys
        except PenstockError as error:
            _log.warning("api_keys_unknown", error=str(error))
            return
        if caller is None and not is_loopback(self._settings.host):
            hint = "whoever reaches the address may ask for anything: make keys with penstock keys create"
            _log.warning("no_api_keys", host=self._settings.host, hint=hint)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics page and its content type, for an Accept header."""
        await self.refresh_metrics()
        return render(self.metrics.registry, accept)

    async def refresh_metrics(self) -> None:
        """Updates metrics that have to be looked up, except after the end: that would open connections again."""
        gateway = getattr(self.app.state, "gateway", None)
        if gateway is not None and not self._is_over:  # the lifespan has begun
            await self._look_at(gateway)

    async def _look_at(self, gateway: Gateway) -> None:
        """Updates which queues are served, as of now or of the last answer from Redis."""
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                await gateway.standing.check()
                served = await gateway.directory.standing()
        except (PenstockError, TimeoutError):
            self.metrics.redis_up.set(0)
        else:
            self.metrics.redis_up.set(1)
            self.metrics.set_served(served)
        self.metrics.set_trouble(gateway.standing.trouble)

    def stop(self) -> None:
        """Begins the drain, unless it has begun; a second call ends it."""
        if self._is_told:
            self.abort()
        self._is_told = True
        self.drain()

    def drain(self) -> None:
        """Begins the drain. If it has begun, it continues."""
        if not self.should_exit:
            self.should_exit = self.app.state.is_draining = True
            _log.info("draining", connections=len(self.server_state.connections))

    def abort(self) -> None:
        """Ends the drain, beginning it first if necessary."""
        self.drain()
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.cut()  # type: ignore[union-attr]  # all are the guard's

    def reload(self) -> None:
        """Checks the certificate and those for Redis now. Unusable ones are refused and logged again."""
        if self._renew(is_asked=True):
            _log.info("reloaded")

    def _renew(self, *, is_asked: bool = False) -> bool:
        """Makes new connections use the current files. False: they use the old ones, as the current ones are
        unusable.
        """
        tls.look_again()
        if self._certificate is None:
            return True
        outcome, file = self._certificate.look(is_asked=is_asked), str(self._settings.tls_certificate)
        self.config.ssl = self._certificate.value
        if outcome == "refused":
            _log.error("certificate_refused", file=file, error=str(self._certificate.error))
        elif outcome == "renewed" and not is_asked:
            _log.info("certificate_renewed", file=file)
        return outcome != "refused"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        interruptions = self.app.state.gateway.interruptions
        timeout_s = self._settings.drain_timeout_s
        ending = asyncio.get_running_loop().call_later(timeout_s, interruptions.end_all, STOPPING)
        try:
            await super().shutdown(sockets)
            if self.force_exit:
                await self.lifespan.shutdown()  # uvicorn leaves this out then, and connections would stay open
        finally:
            self._is_over = True
            ending.cancel()
            await end_tasks(self._tasks)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can connect to the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def serving_metrics(server: GatewayServer, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serves GET /metrics and probes on `listener`, if there is one, during the block."""
    if listener is None:
        yield
        return

    async def scrape(asked: Request) -> Response:
        page, content_type = await server.scrape(",".join(asked.headers.getlist("accept")))
        return Response(page, headers={"content-type": content_type})

    app = Starlette(routes=[Route("/metrics", scrape), *health.ROUTES])
    app.state = server.app.state
    beside = _Server(app, METRICS_LIMITS, lifespan="off", timeout_graceful_shutdown=1)
    task = asyncio.create_task(beside.serve([listener]))
    try:
        yield
    finally:
        beside.should_exit = True
        await task


def _limits(settings: GatewaySettings, max_connections: int) -> PortLimits:
    return PortLimits(
        max_connections=max_connections,
        probes=PROBES,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        max_header_bytes=settings.max_header_bytes,
    )
