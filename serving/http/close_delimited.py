"""Answers to HTTP/1.0, whose clients do not know chunks: a body of unknown length ends with the connection (RFC 9112,
6.3).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_NO_LINGER = struct.pack("ii", 1, 0)

App = Callable[..., Awaitable[None]]


class CloseDelimited:
    """Runs `app` for one HTTP/1.0 request. Set `cycle` to the request's before calling it.

    A body without a length that ends too early ends with a reset: a normal close would mean that it is complete.
    """

    cycle: RequestResponseCycle

    def __init__(self, app: App) -> None:
        self._app = app
        self._is_open = False  # a body without a length has begun and not ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._is_open = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if self._is_open:
                    self.cycle.chunked_encoding = False
            elif self._is_open:
                self.cycle.expected_content_length = len(message.get("body", b""))  # of this part alone
                self._is_open = message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_plain)
        finally:
            self.break_off()

    def break_off(self) -> None:
        """Resets the connection if the body is incomplete."""
        if self._is_open:
            self._is_open = False
            reset(self.cycle.transport)


def reset(transport: asyncio.Transport) -> None:
    """Closes a connection at once, so that its client sees an error and not a normal end."""
    connection = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
