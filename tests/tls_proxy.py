"""Speaks TLS in front of a server that speaks none."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from types import TracebackType

from gateway_harness import Certificate


class TlsProxy:
    """Listens on a free port of 127.0.0.1 within `async with`, and forwards to a port of it.

    Attributes:
        num_connections: that were taken so far, those that were refused by TLS left out.
    """

    def __init__(self, server_port: int, certificate: Certificate, *, clients: Path | None = None) -> None:
        """`clients`: the certificate that clients have to show; None: none."""
        self._server_port = server_port
        self._links: set[asyncio.Task[None]] = set()
        self._tls = _context(certificate, clients)
        self.num_connections = 0
        self.port = 0

    async def show(self, certificate: Certificate, *, clients: Path | None = None) -> None:
        """To new connections, from now on. Those that there are stay."""
        self._tls = _context(certificate, clients)
        self._server.close()
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Closes all connections there are."""
        for link in list(self._links):
            link.cancel()

    async def __aenter__(self) -> TlsProxy:
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        link = asyncio.create_task(self._serve(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        await asyncio.wait({link})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        try:
            server_reader, server = await asyncio.open_connection("127.0.0.1", self._server_port)
            ways = [asyncio.create_task(_copy(*ends)) for ends in ((reader, server), (server_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in (writer, server):
                if end is not None:
                    end.transport.abort()


def _context(certificate: Certificate, clients: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.file, certificate.key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # a client learns within the handshake that it is refused
    return context


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
