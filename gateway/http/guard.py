"""What a stranger may hold of an HTTP server: so many connections and bytes, and each only for so long.

uvicorn bounds none of it. It waits for ever for a request that never ends, or for a client that takes nothing of its
answer; it gathers headers of any size; and connections use up the descriptors of a process that needs them for
something else. Nothing here is about Penstock: any of its HTTP servers can be made so.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.gateway.http.handshake import Handshake, Waiting

ACCEPTS_AT_ONCE = 16
"""Before any of them is looked at: they come on top of the limit, and must be far fewer than it, or else a whole
request that comes among them is turned away unread."""

NUM_QUEUED = 1024
"""Connections that wait in the kernel to be accepted. Where it has no place, a client tries again only after 1 s."""

MAX_PIPELINED = 8
"""Requests of one connection that may wait for the answer to the one before. No client of today sends any."""

LINGER_S = 2.0
"""How long what a refused client still sends is dropped: a connection reset would take away what it was told."""

_NUM_SEPARATORS = 4  # bytes around the name and the value of a header


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one server.

    Over `max_connections` the one that has waited longest without a whole request is closed, be it the newest: who
    holds connections open, or goes on opening them, cannot keep out a client that sends its request at once.
    """

    max_connections: int
    header_timeout_s: float  # from the connection to the end of the headers, and before that of the TLS handshake
    body_timeout_s: float  # from there to the end of the body
    idle_timeout_s: float = 5.0  # after an answer, with the time for headers on top once they begin
    answer_timeout_s: float | None = None  # from the request to the end of the answer; None: for as long as it takes
    stall_timeout_s: float | None = None  # in which the client takes nothing of its answer; None: it may
    max_header_bytes: int = 64 << 10  # of a request, with its first line and its trailers


class GuardedServer(uvicorn.Server):
    """Serves `app` over HTTP/1.1 to connections that keep to `limits`. `options` are those of `uvicorn.Config`."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        super().__init__(_GuardedConfig(app, limits, **options))

    config: _GuardedConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # with none it listens to none
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            # Its connections have this from it; asyncio sees to it only for sockets made with the number of a protocol.
            # Without it the second packet of an answer waits for the client's delayed acknowledgement: 40 ms.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted = self._protocol if self.config.ssl is None else self._handshake
            server = await loop.create_server(accepted, sock=listener, backlog=ACCEPTS_AT_ONCE)
            listener.listen(NUM_QUEUED)  # asyncio has one number for this and for how many it accepts at once
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.config.waiting):
            if isinstance(connection, Handshake):
                connection.cut()
        await super().shutdown(sockets)

    def _handshake(self) -> asyncio.Protocol:
        assert self.config.ssl is not None  # noqa: S101  or else `_protocol` would be asked
        timeout_s = self.config.limits.header_timeout_s
        return Handshake(self.config.ssl, timeout_s, self.config.waiting, self._protocol, self.config.admit)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


class _GuardedConfig(uvicorn.Config):
    """Each connection is made with it, so it is where they find each other."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        # A WebSocket would take the connection out of the protocol's hands.
        super().__init__(
            app,
            http=_GuardedProtocol,
            ws="none",
            backlog=ACCEPTS_AT_ONCE,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # goes to `call_later`
            **options,
        )
        self.limits = limits
        self.waiting: dict[Waiting, None] = {}  # for a whole request; who waits longest comes first
        self.answering: set[_GuardedProtocol] = set()

    def admit(self) -> None:
        """Makes room for one that has just begun to wait."""
        if len(self.waiting) + len(self.answering) > self.limits.max_connections:
            next(iter(self.waiting)).cut()


class _Refused(Exception):
    """Ends the parsing of a request, which is answered with this."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class _GuardedProtocol(HttpToolsProtocol):
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
        self._stall: asyncio.TimerHandle | None = None
        self._refusal: _Refused | None = None
        self._is_deaf = False  # to whatever the client still sends
        self._wants_upgrade = False
        self._num_header_bytes = 0
        self._num_silent_bytes = 0  # that have made no whole header and no part of a body: the parser gathers them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        super().connection_made(transport)
        self._wait(self._guard.limits.header_timeout_s)
        self._guard.admit()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        had_request = self._has_request
        self._num_silent_bytes += len(data)
        self._parse(data)
        if self._is_deaf or self.transport.is_closing():
            return
        if self._num_silent_bytes > self._guard.limits.max_header_bytes:
            self._refuse(self._headers_too_large)
        elif self in self._guard.waiting:
            if self._has_whole_request:
                self._answer()
            elif self._has_request and not had_request:
                self._wait(self._guard.limits.body_timeout_s)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal or _Refused(400, "this is no valid HTTP request", "invalid_http"))

    def _without_upgrade(self) -> bytes:
        """The head of a request that asked for another protocol, as if it had not: a server may go on so (RFC 9110,
        7.8), and clients that ask for HTTP/2 in this way rely on it. The parser takes what follows for that protocol.
        """
        self._wants_upgrade = False
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return first + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_silent_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_header(len(name) + len(value) + _NUM_SEPARATORS)

    def on_headers_complete(self) -> None:
        self._wants_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._wants_upgrade:
            return
        self._refusal = self._wrong_head()
        if self._refusal is not None:
            raise self._refusal
        super().on_headers_complete()

    def _wrong_head(self) -> _Refused | None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return _Refused(505, f"HTTP {version} is not served, HTTP 1.1 is", "http_version_not_supported")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            return _Refused(400, f"the request has {num_hosts} Host headers, not one", "invalid_http")
        if len(self.pipeline) >= MAX_PIPELINED:
            return _Refused(429, f"more than {MAX_PIPELINED} requests wait on this connection", "pipelined")
        return None

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent_bytes = 0
        if not self._wants_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # goes on with the next request, if that is there already
        if self.transport.is_closing():
            return
        if self._has_whole_request:
            self._answer()
        elif self.cycle.more_body:  # of the next request, or of this one, which was answered before its end
            self._wait(self._guard.limits.body_timeout_s)
        else:
            self._wait(self._guard.limits.idle_timeout_s + self._guard.limits.header_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unwatch_stall()
        super().connection_lost(exc)

    @property
    def _has_request(self) -> bool:
        """The headers of one that is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        """With its body."""
        return self._has_request and (not self.cycle.more_body or bool(self.pipeline))

    @property
    def _headers_too_large(self) -> _Refused:
        limit = self._guard.limits.max_header_bytes
        return _Refused(431, f"the headers are over the limit of {limit} bytes", "headers_too_large")

    def _count_header(self, num_bytes: int) -> None:
        self._num_silent_bytes = 0
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._guard.limits.max_header_bytes:
            self._refusal = self._headers_too_large
            raise self._refusal

    def _refuse(self, refusal: _Refused) -> None:
        """Says why and ends the connection; amid an answer it only does not listen any more."""
        self._is_deaf = True
        if self._has_request and not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif self._has_request and (self.cycle.response_started or self.pipeline):
            self.cut()
        else:
            self._say(refusal)
            self._linger()

    def _say(self, refusal: _Refused) -> None:
        detail = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": refusal.code}
        body = json.dumps({"error": detail}).encode()
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def _linger(self) -> None:
        """For the application the client is gone."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(LINGER_S)

    def _wait(self, timeout_s: float) -> None:
        """Where it waits already it keeps its place among those that wait."""
        if self in self._guard.waiting:
            self._end_deadline()
        else:
            self._leave()
            self._guard.waiting[self] = None
        self._deadline = self.loop.call_later(timeout_s, self._expire)

    def _answer(self) -> None:
        self._leave()
        self._guard.answering.add(self)
        if self._guard.limits.answer_timeout_s is not None:
            self._deadline = self.loop.call_later(self._guard.limits.answer_timeout_s, self.cut)

    def _leave(self) -> None:
        self._guard.waiting.pop(self, None)
        self._guard.answering.discard(self)
        self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._has_request and not self._is_deaf:
            timeout_s = self._guard.limits.body_timeout_s
            self._refuse(_Refused(408, f"the body did not come within {timeout_s:g} s", "body_timeout"))
        else:
            self.cut()

    def _watch_stall(self) -> None:
        timeout_s = self._guard.limits.stall_timeout_s
        if timeout_s is not None:
            num_unsent = self.transport.get_write_buffer_size()
            self._stall = self.loop.call_later(timeout_s, self._end_stall, num_unsent)

    def _unwatch_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _end_stall(self, num_unsent: int) -> None:
        if self.transport.get_write_buffer_size() >= num_unsent:
            self.cut()
        else:
            self._watch_stall()

    def cut(self) -> None:
        """At once: closing would first wait for the client to take what is still to be sent."""
        self._leave()
        self.transport.abort()
