"""Limits connections before their TLS handshake, which asyncio does not report to anybody."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from penstock.serving.http.places import Places


class Handshake(asyncio.Protocol):
    """One connection until its TLS handshake is done; then the protocol that `make` returns takes over.

    Args:
        tls: the TLS context.
        timeout_s: for the handshake.
        places: where it waits until then.
        make: called once it is done.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        timeout_s: float,
        places: Places,
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        self._tls = tls
        self._timeout_s = timeout_s
        self._places = places
        self._make = make
        self._received: list[bytes] = []  # arrived with the end of the handshake
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as asyncio calls it
        self._transport = transport
        transport.pause_reading()  # until `start_tls` has a protocol for it
        self._places.stand(self, self._places.waiting)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._places.admit()

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True

    def turn_away(self) -> None:
        """Cuts the connection: nothing can be sent to it yet."""
        self.cut()

    def cut(self) -> None:
        self._places.leave(self)
        self._task.cancel()
        self._transport.abort()

    async def _run(self) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._tls, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # a TLS error is one too
            return
        finally:
            self._places.leave(self)
        if transport is None or self._is_lost:
            return
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._received:
            protocol.data_received(b"".join(self._received))
