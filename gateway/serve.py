"""`penstock gateway`: one process that serves, or several that share the port."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from penstock import stopping
from penstock.gateway.processes import ABORT, ABORTED, keep_running
from penstock.gateway.server import GatewayServer, serving_metrics
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store.connection import Store
from penstock.gateway.store.probe import probe
from penstock.producer import PenstockError
from penstock.protocol.redis.faults import is_refused
from penstock.protocol.telemetry.loading import check_telemetry, load_telemetry
from penstock.serving import garbage
from penstock.serving.exporting import exporting
from penstock.serving.hints import hint_for
from penstock.serving.http.certificate import certificate_of
from penstock.serving.http.guard import NUM_ON_TOP
from penstock.serving.listening import listen, shown
from penstock.stopping import Stopping

if TYPE_CHECKING:
    from penstock.protocol.telemetry.sdk import Telemetry

_log = structlog.get_logger(__name__)

REFUSED = 5
"""Exit status after a permanent refusal by Redis, at the start or for too long; the same as a worker's."""

START_LOOK_S = 2.0
"""How long the start waits for Redis, which it does not need."""

_OTHER_DESCRIPTORS = 256 + NUM_ON_TOP
"""Descriptors that a process needs besides those of its clients' requests: connections to Redis, files, pipes, metrics,
and connections that wait, leave or probe it.
"""

_FEWEST_CONNECTIONS = 16
"""With fewer connections it does not start, unless the setting asks for no more."""


class CannotServe(Exception):
    """An address that cannot be listened on, a certificate that cannot be used, or a Redis that refuses access."""

    exit_status = 1


class WrongCertificate(CannotServe):
    """The files that the settings name are missing, or do not match."""

    exit_status = 2


class TooFewDescriptors(CannotServe):
    """The system allows fewer open files than a gateway needs. The message has both numbers."""

    exit_status = 2


class RefusedAtStart(CannotServe):
    """Redis refuses the password or the permissions. The message says what to do."""

    exit_status = REFUSED


def serve(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT, then drains.

    Returns:
        The exit status: 0, `ABORTED` after a second signal, which cut open connections, or `REFUSED`.

    Raises:
        CannotServe: it could not start.
        TelemetryUnavailable: `otel` is set, but telemetry is unavailable.
    """
    _check_tls(settings)
    max_connections = _descriptors_for(settings.max_connections)
    if settings.otel:
        check_telemetry()  # processes that can't would be restarted over and over
    asyncio.run(_check_redis(settings))
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port, "port"))
        metrics = [stack.enter_context(each) for each in _listen_for_metrics(settings)]
        _log.info(
            "listening",
            url=_url("http" if settings.tls_key is None else "https", listener),
            metrics=[_url("http", each) for each in metrics],
            workers=settings.workers,
        )
        process = _Process(settings, listener, metrics, max_connections)
        signals = stack.enter_context(stopping.current())
        if settings.workers == 1:
            status = process.run(signals)
        else:
            status = keep_running(settings.workers, process.work, signals, lambda status: status == REFUSED)
    _log.info("stopped")
    return status


@dataclass(frozen=True, slots=True)
class _Process:
    """Runs one of the processes."""

    settings: GatewaySettings
    listener: socket.socket
    metrics_listeners: Sequence[socket.socket]  # by place; empty: no metrics are served
    max_connections: int

    def work(self, place: int, lifeline: int, signals: Stopping) -> int:
        """Runs as one of several, until SIGTERM, or until `lifeline` can be read."""
        return asyncio.run(self._serve(place, signals, lifeline))

    def run(self, signals: Stopping) -> int:
        """Runs as the only one, until SIGTERM or SIGINT."""
        return asyncio.run(self._serve(0, signals, None))

    async def _serve(self, place: int, signals: Stopping, lifeline: int | None) -> int:
        telemetry = load_telemetry("penstock-gateway") if self.settings.otel else None
        server = GatewayServer(self.settings, self.max_connections, telemetry)
        loop = asyncio.get_running_loop()
        stop = server.stop
        if lifeline is not None:
            stop = server.drain  # a terminal sends it to the whole group, sooner than the parent that decides
            loop.add_reader(lifeline, self._lose_parent, server, lifeline)
            loop.add_signal_handler(ABORT, server.abort)
        metrics_listener = self.metrics_listeners[place] if self.metrics_listeners else None
        garbage.settle()  # a large body could trigger a full collection, which would delay all streams
        with signals.serving(loop, stop, server.reload):
            await self._run(server, telemetry, metrics_listener)
        if server.force_exit:
            return ABORTED
        return REFUSED if server.is_refused else 0

    async def _run(
        self, server: GatewayServer, telemetry: Telemetry | None, metrics_listener: socket.socket | None
    ) -> None:
        async with (
            exporting(telemetry, server.metrics.registry, server.refresh_metrics),
            serving_metrics(server, metrics_listener),
        ):
            await server.serve([self.listener])

    def _lose_parent(self, server: GatewayServer, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        server.drain()


async def _check_redis(settings: GatewaySettings) -> None:
    """Fails at the start if Redis refuses permanently. One that is away may come back.

    Raises:
        RefusedAtStart: Redis refuses.
    """
    async with Store(settings.address(), answer_timeout_s=START_LOOK_S) as store:
        try:
            await probe(store)
        except PenstockError as error:
            if is_refused(error):
                raise RefusedAtStart(f"{str(error).rstrip('.')}; {hint_for(error)}") from error


def _listen(host: str, port: int, setting: str) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise CannotServe(f"cannot listen on {host} port {port}: {error}; set host or {setting}") from error


def _listen_for_metrics(settings: GatewaySettings) -> Iterable[socket.socket]:
    """Opens a listener for each process: the counts are in its memory."""
    first = settings.metrics_port
    if first is not None:
        for place in range(settings.workers):
            yield _listen(settings.host, first + place if first else 0, "metrics_port")


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{shown(host, port)}"


def _check_tls(settings: GatewaySettings) -> None:
    try:
        certificate_of(settings.tls_certificate, settings.tls_key)
    except (OSError, ValueError) as error:
        files = f"tls_certificate {settings.tls_certificate} and tls_key {settings.tls_key}"
        places = f"{settings.place('tls_certificate')}, {settings.place('tls_key')}"
        raise WrongCertificate(f"{places}: {files} cannot be used: {error}") from error


def _descriptors_for(max_connections: int) -> int:
    """Makes the system allow enough descriptors; returns the number of connections that they suffice for.

    Raises:
        TooFewDescriptors: too few of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_DESCRIPTORS
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError):  # a sandbox that refuses it
            allowed = soft
    fewest = min(max_connections, _FEWEST_CONNECTIONS) + _OTHER_DESCRIPTORS
    if allowed < fewest:
        raise TooFewDescriptors(
            f"the system allows {allowed} open files (RLIMIT_NOFILE), and a gateway needs {fewest}, {needed} for "
            f"max_connections = {max_connections}: raise it with ulimit -n, LimitNOFILE or --ulimit nofile"
        )
    if allowed < needed:
        _log.warning("few_descriptors", limit=allowed, max_connections=allowed - _OTHER_DESCRIPTORS)
    return allowed - _OTHER_DESCRIPTORS
