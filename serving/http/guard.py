"""Limits what a stranger may hold of an HTTP server: the number of connections and bytes, and each for a limited time.

uvicorn has no such limits. It waits forever for a request that never ends, or for a client that does not read its
answer. It gathers headers of any size, and connections use up descriptors that the process needs for other things.
Nothing here is specific to Penstock: any of its HTTP servers can use it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.serving.http.close_delimited import CloseDelimited
from penstock.serving.http.handshake import Handshake
from penstock.serving.http.places import NUM_KEPT, NUM_LEAVING, Connection, Places
from penstock.serving.http.refusals import FULL, Refused, wrong_head

ACCEPTS_AT_ONCE = 16
"""Number of connections accepted before any is looked at. They come on top of the limit, and must be far fewer than it:
otherwise a complete request among them is turned away unread.
"""

NUM_QUEUED = 1024
"""Connections that wait in the kernel to be accepted. If its queue is full, a client retries only after 1 s."""

MAX_PIPELINED = 8
"""Requests of one connection that may wait for the previous answer. No current client sends any."""

NUM_ON_TOP = NUM_KEPT + NUM_LEAVING + ACCEPTS_AT_ONCE
"""Descriptors that connections of one server may take in addition to `max_connections`."""

LINGER_S = 2.0
"""How long input from a refused client is dropped: a reset would discard the answer that it was sent."""

_NUM_SEPARATORS = 4  # bytes around the name and the value of a header


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    """Limits of one server.

    `max_connections` may have a request that is read or answered, and some more wait (`Places`). A request over it is
    answered with 503, as is the longest waiting connection if too many wait. `probes` are answered all the same.
    """

    max_connections: int
    probes: frozenset[str] = frozenset()  # paths that report the process's health
    header_timeout_s: float  # from the connection to the end of the headers, and before that of the TLS handshake
    body_timeout_s: float  # from there to the end of the body
    idle_timeout_s: float = 5.0  # after an answer; once headers begin, their time is added
    answer_timeout_s: float | None = None  # from the request to the end of the answer; None: unlimited
    stall_timeout_s: float | None = None  # how long the client may take nothing of its answer; None: unlimited
    max_header_bytes: int = 64 << 10  # of a request, including its first line and its trailers


class GuardedServer(uvicorn.Server):
    """Serves `app` over HTTP/1.1 to connections that keep within `limits`. `options` are those of `uvicorn.Config`."""

    def __init__(self, app: Any, limits: PortLimits, **options: Any) -> None:
        super().__init__(_GuardedConfig(app, limits, **options))

    config: _GuardedConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # with an empty list it listens to none
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            # Connections inherit this. asyncio sets it only for sockets made with the number of a protocol. Without it
            # the second packet of an answer waits for the client's delayed acknowledgement: 40 ms.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted = self._protocol if self.config.ssl is None else self._handshake
            server = await loop.create_server(accepted, sock=listener, backlog=ACCEPTS_AT_ONCE)
            listener.listen(NUM_QUEUED)  # asyncio uses one number for this and for how many it accepts at once
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.config.places.waiting):
            if isinstance(connection, Handshake):
                connection.cut()
        await super().shutdown(sockets)

    def _handshake(self) -> asyncio.Protocol:
        assert self.config.ssl is not None  # noqa: S101  or else `_protocol` would be asked
        timeout_s = self.config.limits.header_timeout_s
        return Handshake(self.config.ssl, timeout_s, self.config.places, self._protocol)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


class _GuardedConfig(uvicorn.Config):
    """Configuration that all connections share, through which they find each other."""

    def __init__(self, app: Any, limits: PortLimits, **options: Any) -> None:
        # A WebSocket would take the connection away from the protocol.
        super().__init__(
            app,
            http=_GuardedProtocol,
            ws="none",
            backlog=ACCEPTS_AT_ONCE,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # goes to `call_later`
            **options,
        )
        self.limits = limits
        self.places = Places(limits.max_connections)


class _GuardedProtocol(HttpToolsProtocol):
    """One connection. It has one of the `Places`, with a deadline, until it is cut or lost."""

    def __init__(
        self,
        config: _GuardedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = config
        self._places = config.places
        self._bare_app = self.app
        self._plain: CloseDelimited | None = None  # the answer to an HTTP/1.0 request
        self._is_probe = False  # whether all requests that wait for an answer are probes
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._refusal: Refused | None = None
        self._is_deaf = False  # whether further input from the client is ignored
        self._wants_upgrade = False
        self._num_header_bytes = 0
        self._num_silent_bytes = 0  # held by the parser: not yet a whole header or a part of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        super().connection_made(transport)
        self._wait(self._guard.limits.header_timeout_s)
        self._places.admit()

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
        elif self in self._places.waiting or self in self._places.reading:
            if self._has_whole_request:
                self._answer()
            elif self._has_request and not had_request:
                self._read()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal or Refused(400, "this is not a valid HTTP request", "invalid_http"))

    def _without_upgrade(self) -> bytes:
        """Returns the head of a request without its wish for another protocol. A server may ignore that (RFC 9110,
        7.8), and clients that ask for HTTP/2 this way rely on it. The parser would take what follows for that protocol.
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
        is_probe = self._asks_as_probe()
        self._refusal = self._wrong_head() or self._no_room(is_probe)
        if self._refusal is not None:
            raise self._refusal
        self._is_probe = is_probe and (self._is_probe or not self._has_request)
        if self.parser.get_http_version() == "1.1":
            self.app = self._bare_app
            super().on_headers_complete()
            return
        self.expect_100_continue = False  # an HTTP/1.0 client does not know such an answer (RFC 9110, 10.1.1)
        self.app = self._plain = CloseDelimited(self._bare_app)
        super().on_headers_complete()
        self._plain.cycle = self.cycle

    def _asks_as_probe(self) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        return path in self._guard.limits.probes and self.parser.get_method() in (b"GET", b"HEAD")

    def _no_room(self, is_probe: bool) -> Refused | None:
        """Returns the refusal if there is no room. A request that is being read or answered already has its place."""
        has_place = is_probe or (self._has_request and not self._is_probe)
        return None if has_place or self._places.has_room() else FULL

    def _wrong_head(self) -> Refused | None:
        if len(self.pipeline) >= MAX_PIPELINED:
            return Refused(429, f"more than {MAX_PIPELINED} requests wait on this connection", "pipelined")
        return wrong_head(self.parser.get_http_version(), self.headers)

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent_bytes = 0
        if not self._wants_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # continues with the next request, if that is there already
        limits = self._guard.limits
        if self.transport.is_closing() or not (self._has_request or self.cycle.more_body):
            self._wait(limits.idle_timeout_s + limits.header_timeout_s)  # and takes what is not sent yet
        elif self._has_whole_request:
            self._answer()
        elif self._has_request:
            self._read()
        else:  # this one was answered before its end
            self._wait(limits.body_timeout_s)

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
        """Whether the headers of an unanswered request are there."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        """Whether its body is there too."""
        return self._has_request and (not self.cycle.more_body or bool(self.pipeline))

    @property
    def _headers_too_large(self) -> Refused:
        limit = self._guard.limits.max_header_bytes
        return Refused(431, f"the headers are over the limit of {limit} bytes", "headers_too_large")

    def _count_header(self, num_bytes: int) -> None:
        self._num_silent_bytes = 0
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._guard.limits.max_header_bytes:
            self._refusal = self._headers_too_large
            raise self._refusal

    def _refuse(self, refusal: Refused) -> None:
        """Sends a refusal and ends the connection; amid an answer it only stops listening."""
        self._is_deaf = True
        if self._has_request and not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif self._has_request and self._is_amid_answers:
            self.cut()
        else:
            self.transport.write(refusal.answer())
            self._linger()

    def _linger(self) -> None:
        """Drops further input; for the application the client is gone."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client left before it was told: its kernel has reset the connection meanwhile
            self.cut()
        else:
            self._stand(self._places.leaving, LINGER_S, self.cut)

    def turn_away(self) -> None:
        """Answers that the server is full, if the client would read that as an answer."""
        if self._is_deaf or self.transport.is_closing() or (self._has_request and self._is_amid_answers):
            self.cut()
            return
        self._is_deaf = True
        self.transport.write(FULL.answer())
        self._linger()

    @property
    def _is_amid_answers(self) -> bool:
        return self.cycle.response_started or bool(self.pipeline)

    def _wait(self, timeout_s: float) -> None:
        self._stand(self._places.waiting, timeout_s, self.cut)

    def _read(self) -> None:
        where = self._places.waiting if self._is_probe else self._places.reading
        self._stand(where, self._guard.limits.body_timeout_s, self._expire)

    def _answer(self) -> None:
        limits = self._guard.limits
        if self._is_probe:
            self._leave()
            self._wait(limits.answer_timeout_s or limits.header_timeout_s)
        else:
            self._stand(self._places.answering, limits.answer_timeout_s, self.cut)

    def _stand(self, where: dict[Connection, None], timeout_s: float | None, end: Callable[[], None]) -> None:
        """Moves to a set of places; a connection that is there already keeps its place."""
        self._end_deadline()
        self._places.stand(self, where)
        if timeout_s is not None:
            self._deadline = self.loop.call_later(timeout_s, end)

    def _leave(self) -> None:
        self._places.leave(self)
        self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._is_deaf:
            self.cut()
        else:
            timeout_s = self._guard.limits.body_timeout_s
            self._refuse(Refused(408, f"the body did not come within {timeout_s:g} s", "body_timeout"))

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
        """Closes at once: a normal close would first wait for the client to read the rest."""
        self._leave()
        if self._plain is not None:
            self._plain.break_off()
        self.transport.abort()
