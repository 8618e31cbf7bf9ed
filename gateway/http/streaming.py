"""Streams a reply as events, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.errors import ApiError
from penstock.gateway.http.answers import error_response
from penstock.gateway.http.disconnect import ClientGone, while_wanted
from penstock.gateway.http.events import (
    BEFORE_ALL,
    OPENING,
    PING,
    EventWriter,
    Place,
    ServerSentEvent,
    encode,
    entry_of,
    prefill_comment,
)
from penstock.gateway.http.interruptions import Interruption
from penstock.gateway.http.resuming import AFTER_ALL, Entry, Sought, SoughtPlace
from penstock.gateway.http.unexpected import internal_error, log_unexpected
from penstock.producer import PenstockError, ReplyStream
from penstock.protocol.tasks import end_tasks

HEADERS: Mapping[str, str] = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends the events of `reply` that come after `after`.

    The status is held back until there is an event, or until `commit_after_s`. An error before that has its own status,
    as has an `after` that is not an event of the reply. From then on a comment is sent whenever there was nothing for
    `ping_interval_s`, and with each report of a long prompt's progress.

    Args:
        reply: read from its beginning, and closed at the end.
        writer: writes the events.
        reading: entered while the client is there.
        interruption: ends the stream with its error.
        told: notes an error of the queue, and returns what the client learns of it.
        commit_after_s: see above.
        ping_interval_s: see above.
        after: the last event that the client has.
        opening: returns events to send before the reply's first event. They are sent with that event, or alone as soon
            as the status is sent.
        sought: what else must be among the reply's events.
        is_sure: whether to send the status as soon as `after` and `sought` are found; later errors are events.
        headers: added to those of every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        reply: ReplyStream,
        writer: EventWriter,
        *,
        reading: AbstractContextManager[None],
        interruption: Interruption,
        told: Callable[[PenstockError], ApiError],
        commit_after_s: float,
        ping_interval_s: float,
        after: Place = BEFORE_ALL,
        sought: Sequence[Sought] = (),
        opening: Callable[[], Iterable[ServerSentEvent | None]] | None = None,
        is_sure: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._reply = reply
        self._writer = writer
        self._reading = reading
        self._interruption = interruption
        self._told = told
        self._commit_after_s = commit_after_s
        self._ping_interval_s = ping_interval_s
        self._after = after
        self._sought = [*sought] if after == BEFORE_ALL else [SoughtPlace(after), *sought]
        self._is_placed = asyncio.Event()  # set once nothing is sought any more
        self._opening = opening
        self._is_sure = is_sure
        self.has_begun = False
        """Whether the status was sent, so that errors have to be events."""
        self._beginning = asyncio.Lock()  # a ping and the first event may come at the same time
        self._is_quiet = True  # whether nothing was sent since the last check of `_keep_alive`
        self._has_prefilled = asyncio.Event()  # set if the prompt has got further since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._reading:
                error = await self._serve_until_interrupted(receive, send)
                if error is not None:
                    await while_wanted(receive, self._fail(error, scope, receive, send))
        except (ClientGone, ClientDisconnect, OSError):
            pass  # there is nobody to tell
        finally:
            await self._reply.aclose()

    async def _serve_until_interrupted(self, receive: Receive, send: Send) -> ApiError | None:
        """Returns the error that the client has not been sent yet."""
        try:
            await while_wanted(receive, self._serve(send), self._interruption)
        except ApiError as error:
            return error
        except PenstockError as error:
            return self._told(error)
        except (ClientGone, ClientDisconnect, OSError):
            raise
        except Exception as error:
            log_unexpected("stream_failed", error, reply=self._reply.request_id)
            return internal_error()
        return None

    async def _serve(self, send: Send) -> None:
        async with self._kept_alive(send):
            last = await self._send_events(send)
        await self._begin(send)
        await send({"type": "http.response.body", "body": last})

    async def _send_events(self, send: Send) -> bytes:
        """Sends all events but the last ones, and returns those."""
        writer = self._writer
        if self._is_sure or self._sought:
            await self._write(self._open(), send)
        async for chunks in self._reply.batches():
            data = [self._open()]  # before the writer goes on
            data += [self._encode(writer.chunk(chunk), chunk.entry_id) for chunk in chunks]
            await self._write(b"".join(data), send)
        reply = self._reply.reply
        assert reply is not None  # noqa: S101  the chunks end with the reply or raise
        last = self._open() + self._encode(writer.end(reply), reply.entry_id)
        self._seek(AFTER_ALL, 0)
        return last

    def _open(self) -> bytes:
        """Returns what comes before the reply's events, once."""
        opening, self._opening = self._opening, None
        if opening is None and not self._sought:
            return b""
        return self._encode(() if opening is None else opening(), OPENING)

    def _encode(self, events: Iterable[ServerSentEvent | None], entry_id: str | None) -> bytes:
        if self._sought:
            events = list(events)
            self._seek(AFTER_ALL if entry_id is None else entry_of(entry_id), len(events))
        return encode(events, entry_id, self._after)

    def _seek(self, entry: Entry, num_events: int) -> None:
        self._sought = [each for each in self._sought if not each.is_reached(entry, num_events)]
        if not self._sought:
            self._is_placed.set()

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data = self._failure(error)
        except ApiError as refusal:
            error, data = refusal, None
        if data is None:
            await error_response(error, scope)(scope, receive, send)
            return
        await self._write(data, send)
        await send({"type": "http.response.body", "body": b""})

    def _failure(self, error: ApiError) -> bytes | None:
        """Returns the events for an error; None: the status tells it.

        Raises:
            ApiError: the client's last event is not one of the answer's.
        """
        if not (self.has_begun or (self._is_sure and error.ends_reply)):
            return None
        events = [*self._writer.error(error)]
        self._seek(AFTER_ALL, 0)
        return encode(events)

    async def _begin(self, send: Send) -> None:
        async with self._beginning:
            if not self.has_begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self.has_begun = True

    async def _write(self, data: bytes, send: Send) -> None:
        if not self.has_begun and (data or (self._is_sure and not self._sought)):
            await self._begin(send)
        if data:
            self._is_quiet = False
            await send({"type": "http.response.body", "body": data, "more_body": True})

    @asynccontextmanager
    async def _kept_alive(self, send: Send) -> AsyncIterator[None]:
        task = asyncio.create_task(self._keep_alive(send))
        try:
            yield
        finally:
            await end_tasks([task])

    async def _keep_alive(self, send: Send) -> None:
        if self._sought:
            await self._is_placed.wait()
        await asyncio.sleep(self._commit_after_s)
        self._reply.on_prefill(lambda prefill: self._has_prefilled.set())
        while True:
            self._has_prefilled.clear()
            if (prefill := self._reply.prefill) is not None:
                await self._write(self._open() + prefill_comment(prefill), send)
            elif self._is_quiet:
                await self._write(self._open() or PING, send)
            self._is_quiet = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_prefilled.wait(), self._ping_interval_s)
