"""Speaks TLS in front of a server that speaks none."""

from __future__ import annotations

import ssl
from pathlib import Path

from tests.support.programs.gateway_harness import Certificate
from tests.support.redis_servers.forwarding import Forwarding


class TlsProxy(Forwarding):
    """Speaks TLS and forwards to a port of 127.0.0.1."""

    def __init__(self, server_port: int, certificate: Certificate, *, clients: Path | None = None) -> None:
        """`clients`: the certificate that clients have to show; None: none."""
        super().__init__("127.0.0.1", server_port, tls_of(certificate, clients))

    async def show(self, certificate: Certificate, *, clients: Path | None = None) -> None:
        """Uses these certificates for new connections. Existing ones stay."""
        self._tls = tls_of(certificate, clients)
        await self.listen()


def tls_of(certificate: Certificate, clients: Path | None = None) -> ssl.SSLContext:
    """Returns a server's TLS context for a certificate. With `clients`, a client must show a certificate of those."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.file, certificate.key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # a client learns within the handshake that it is refused
    return context
