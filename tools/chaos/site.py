"""The Redis server of a run."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.address import parse_url


class Site:
    """An embedded server with a `data_dir`, which can be restarted, or the server of a URL, which is never restarted.

    Raises:
        ValueError: a plain TCP proxy can't stand in front of the URL's server.
    """

    def __init__(self, server: EmbeddedServer | str) -> None:
        self._server = server if isinstance(server, EmbeddedServer) else None
        self.url = server.url if isinstance(server, EmbeddedServer) else server
        address = parse_url(self.url)
        if address.kind != "single" or address.tls:
            raise ValueError(f"chaos needs one server that speaks plain TCP, redis://, and not {address}")
        self.host_and_port = address.hosts[0]
        self._restarting = asyncio.Lock()

    @property
    def is_own(self) -> bool:
        """Whether the run has started it, and may restart it."""
        return self._server is not None

    def url_through(self, port: int) -> str:
        """Returns the URL with a proxy's port."""
        parts = urlsplit(self.url)
        userinfo, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{userinfo}{at}127.0.0.1:{port}"))

    async def restart(self, away_s: float) -> None:
        """Kills the server (SIGKILL), and restarts it with the same data.

        Raises:
            ValueError: the server is not this run's own.
        """
        if self._server is None:
            raise ValueError(f"the server at {self.host_and_port[0]} is not this run's own: it can't be restarted")
        async with self._restarting:
            self._server.kill()
            try:
                await asyncio.sleep(away_s)
            finally:
                self._server.start()  # blocks meanwhile: everybody has to wait for it anyway
