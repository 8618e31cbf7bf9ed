"""A response as events. They and their numbers depend only on the request and the reply."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.gateway.common.documents import Document, created_at, spell
from penstock.gateway.errors import ApiError, ended_early
from penstock.gateway.http.events import ServerSentEvent
from penstock.gateway.responses import documents
from penstock.gateway.responses.output.answer import ResponseOutput
from penstock.gateway.responses.output.items import UnnumberedEvent, part
from penstock.gateway.responses.stored import StoredResponse
from penstock.gateway.responses.tools import offered
from penstock.producer import Chunk, Reply


class ResponseEvents:
    """Writes the events of one response, from its beginning.

    Args:
        response: the response.
        after: the number of the last event that the client has; it gets those after it.
    """

    def __init__(self, response: StoredResponse, *, after: int = -1) -> None:
        self._response = response
        self._after = after
        self._number = 0
        tools = offered(response.asked["tools"])
        self._output = ResponseOutput(response.request_id, has_logprobs=response.has_logprobs, tools=tools)
        self._has_started = False
        self._has_begun = False
        self.document: Document | None = None
        """The body, once the response has ended."""

    @property
    def num_given(self) -> int:
        """Number of events so far, including those that the client has."""
        return self._number

    def begin(self) -> Iterable[ServerSentEvent | None]:
        """Returns the first events of a stored response that waits, which may take long in the background."""
        self._has_begun = True
        if self._response.is_background:
            yield self._status("created", "queued")
            yield self._status("queued", "queued")
        else:
            yield self._status("created", "in_progress")
            yield from self._start()

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent | None]:
        if self._has_started:
            return [self._event(each) for each in self._output.chunk(chunk)]
        return self._first(chunk)

    def _first(self, chunk: Chunk) -> Iterator[ServerSentEvent | None]:
        yield from self._start(chunk.entry_id)
        for each in self._output.chunk(chunk):
            yield self._event(each)

    def end(self, reply: Reply) -> Iterable[ServerSentEvent | None]:
        """Returns the last events. Raises ApiError (408): the request expired."""
        if reply.finish_reason == "expired":
            raise ended_early(reply.finish_reason)
        yield from self._start(reply.entry_id)
        is_completed = reply.finish_reason in ("stop", "tool_calls")
        yield from self._close(is_completed=is_completed)
        self.document = documents.ended(self._response, self._output, reply)
        yield self._whole("completed" if is_completed else "incomplete", self.document)

    def error(self, error: ApiError) -> Iterable[ServerSentEvent | None]:
        """Returns the events for an error: the response's own failure, which everybody finds, or the end of only this
        stream. The latter has no number of its own, so that a client that continues after it misses nothing.
        """
        if error.ends_reply:
            yield from self._start()
            yield from self._close(is_completed=False)
            self.document = documents.failed(self._response, self._output, error)
            yield self._whole("failed", self.document)
            return
        number = max(self._after, self._number - 1)
        body = error.body()
        if error.may_be_retried and self._response.record is not None:
            body["error"]["message"] = f"{error.code}: {self._way_on(number)}"
        fields = {name: body["error"][name] for name in ("code", "message", "param")}
        yield ServerSentEvent(spell({"type": "error", "sequence_number": number, **fields, **body}), "error")

    def take(self, chunk: Chunk) -> None:
        """Takes a chunk whose events nobody reads."""
        deque(self.chunk(chunk), maxlen=0)

    def body(self, end: Reply | ApiError) -> Document:
        """Returns the whole response, once all chunks were taken.

        Args:
            end: the end of its reply; an error is one that everybody finds there.

        Raises:
            ApiError: the request expired (408).
        """
        deque(self.end(end) if isinstance(end, Reply) else self.error(end), maxlen=0)
        assert self.document is not None  # noqa: S101  the last event has it
        return self.document

    def _way_on(self, number: int) -> str:
        return f"GET /v1/responses/{self._response.id}?stream=true&starting_after={number} goes on with this answer"

    def _start(self, entry_id: str | None = None) -> Iterator[ServerSentEvent | None]:
        """Yields what comes before the first item, unless already sent: a response that is not stored begins here."""
        if self._response.created_at is None:
            began_at = int(time.time()) if entry_id is None else created_at(entry_id)
            self._response = replace(self._response, created_at=began_at)
        if not self._has_begun:
            yield from self.begin()
        if not self._has_started:
            self._has_started = True
            yield self._status("in_progress", "in_progress")

    def _close(self, *, is_completed: bool) -> Iterator[ServerSentEvent | None]:
        for each in self._output.close("completed" if is_completed else "incomplete"):
            yield self._event(each)

    def _status(self, name: str, status: documents._ResponseStatus) -> ServerSentEvent | None:
        return self._whole(name, documents.pending(self._response, status))

    def _whole(self, name: str, document: Document) -> ServerSentEvent | None:
        return self._event(part(f"response.{name}", response=document))

    def _event(self, each: UnnumberedEvent) -> ServerSentEvent | None:
        """Numbers an event; None: the client has it."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return None
        kind, fields = each
        return ServerSentEvent(f'{{"type":"{kind}","sequence_number":{number},{fields}}}', kind)
