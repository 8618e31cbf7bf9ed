"""What a stranger may hold of an HTTP server: so many connections, and each only for so long without a request.

uvicorn bounds neither. It waits for ever for headers that never come, and connections use up the descriptors of a
process that needs them for something else. Nothing here is about Penstock: any of its HTTP servers can be made so.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

ACCEPTS_AT_ONCE = 16
"""Before any of them is looked at: they come on top of the limit, and must be far fewer than it, or else a whole
request that comes among them is turned away unread."""

NUM_QUEUED = 1024
"""Connections that wait in the kernel to be accepted. Where it has no place, a client tries again only after 1 s."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server.

    Over `max_connections` the one that has waited longest without a whole request is closed, be it the newest: who
    holds connections open, or goes on opening them, cannot keep out a client that sends its request at once.
    """

    max_connections: int
    header_timeout_s: (
        float  # from the connection to the end of the headers; later requests may idle as well (keep-alive)
    )
    answer_timeout_s: float | None  # from there to the end of the answer; None: for as long as it takes


class GuardedServer(uvicorn.Server):
    """Serves `app` over HTTP/1.1 to connections that keep to `limits`. `options` are those of `uvicorn.Config`."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        super().__init__(_GuardedConfig(app, limits, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(NUM_QUEUED)  # asyncio has one number for this and for how many it accepts at once


class _GuardedConfig(uvicorn.Config):
    """Each connection is made with it, so it is where they find each other."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        # A WebSocket would take the connection out of the protocol's hands.
        super().__init__(app, http=_GuardedProtocol, ws="none", backlog=ACCEPTS_AT_ONCE, **options)
        self.limits = limits
        self.waiting: dict[_GuardedProtocol, None] = {}  # for a whole request; who waits longest comes first
        self.answering: set[_GuardedProtocol] = set()


class _GuardedProtocol(H11Protocol):
    """One connection. It is in `waiting` or in `answering`, with a deadline, until it is cut or lost."""

    def __init__(
        self,
        config: _GuardedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = config
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        super().connection_made(transport)
        self._wait(self._guard.limits.header_timeout_s)
        if len(self._guard.waiting) + len(self._guard.answering) > self._guard.limits.max_connections:
            next(iter(self._guard.waiting)).cut()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._guard.waiting and self._has_request:
            self._answer()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # goes on with the next request, if that is there already
        if self not in self._guard.answering:
            return
        if self._has_request:
            self._answer()
        else:
            self._wait(self.timeout_keep_alive + self._guard.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, timeout_s: float) -> None:
        self._leave()
        self._guard.waiting[self] = None
        self._deadline = self.loop.call_later(timeout_s, self.cut)

    def _answer(self) -> None:
        self._leave()
        self._guard.answering.add(self)
        if self._guard.limits.answer_timeout_s is not None:
            self._deadline = self.loop.call_later(self._guard.limits.answer_timeout_s, self.cut)

    def _leave(self) -> None:
        self._guard.waiting.pop(self, None)
        self._guard.answering.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def cut(self) -> None:
        """At once: closing would first wait for the client to take what is still to be sent."""
        self._leave()
        self.transport.abort()
