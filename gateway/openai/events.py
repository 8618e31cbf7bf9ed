"""Events of chat completions and completions: chunks, each with a part of one choice.

Nearly all chunks have only text. For these the document is built once per choice, and only the text is inserted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from penstock.gateway.common.documents import (
    Document,
    check_ended,
    created_at,
    fingerprint,
    prompt_logprobs,
    spell,
    usage,
)
from penstock.gateway.common.options import Shown
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import ServerSentEvent
from penstock.producer import Choice, Chunk, Reply

DONE = ServerSentEvent("[DONE]")

_MARK = "\x00"
_SPELLED_MARK = spell(_MARK)


class ChoiceEvents(ABC):
    """Writes the events of one reply. `created` is when the writer of its first chunk took the request."""

    kind: ClassVar[str]

    def __init__(self, completion_id: str, model: str, shown: Shown) -> None:
        self._model = model
        self._completion_id = completion_id
        self._shown = shown
        self._is_text_only = not (shown.logprobs or shown.token_ids)
        self._created: int | None = None
        self._fingerprint: str | None = None  # of the first chunk's worker
        self._frames: dict[int, tuple[str, str]] = {}  # of the choices that have begun: the frame around their text
        self._finished: set[int] = set()

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent]:
        frame = self._frames.get(chunk.index)
        if frame is None or not self._is_text_only or chunk.reasoning or chunk.tool_calls or chunk.finish_reason:
            return self._unusual(chunk)
        return (ServerSentEvent(frame[0] + spell(chunk.text) + frame[1]),) if chunk.text else ()

    def end(self, reply: Reply) -> Iterable[ServerSentEvent]:
        check_ended(reply)
        inexact: Document = {} if reply.is_exact else {"exact": False}
        self._fingerprint = self._fingerprint or fingerprint(reply.arithmetic)
        for choice in reply.choices:
            if choice.index not in self._finished:
                yield from self._finish(reply.entry_id, choice, **inexact)
        if self._shown.usage:
            yield self._event(reply.entry_id, [], usage=usage(reply.usage), **inexact)
        yield DONE

    def error(self, error: ApiError) -> Iterable[ServerSentEvent]:
        yield ServerSentEvent(spell(error.body()))

    @abstractmethod
    def part(self, chunk: Chunk, *, is_first: bool) -> Document | None:
        """Returns a chunk's addition to its choice, without index and finish reason; None: nothing is shown."""

    @abstractmethod
    def text_part(self, text: str) -> Document:
        """Returns the addition of a chunk that has only text."""

    @abstractmethod
    def empty_part(self, *, is_first: bool) -> Document:
        """Returns the addition of an empty chunk."""

    def last_part(self, index: int, *, is_first: bool) -> Document:
        """Returns the addition of the event with the finish reason."""
        return self.empty_part(is_first=is_first)

    def _unusual(self, chunk: Chunk) -> Iterable[ServerSentEvent]:
        is_first = chunk.index not in self._frames
        self._fingerprint = self._fingerprint or fingerprint(chunk.arithmetic)
        part = self.part(chunk, is_first=is_first)
        if self._shown.token_ids and chunk.tokens:
            part = {**(part or self.empty_part(is_first=is_first)), "token_ids": chunk.tokens}
        if part is not None or chunk.prompt_logprobs:
            yield self._first_or_next(chunk, part or self.empty_part(is_first=is_first), is_first=is_first)
        if chunk.finish_reason in ("stop", "length", "tool_calls"):  # else the reply's end says it
            ended = Choice(chunk.index, "", (), None, chunk.finish_reason, stop_reason=chunk.stop_reason)
            yield from self._finish(chunk.entry_id, ended)

    def _first_or_next(self, chunk: Chunk, part: Document, *, is_first: bool) -> ServerSentEvent:
        more: Document = {}
        if not self._frames and self._shown.prompt_token_ids is not None:
            more["prompt_token_ids"] = self._shown.prompt_token_ids
        if chunk.prompt_logprobs and self._shown.prompt_logprobs:
            more["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs)
        event = self._event(chunk.entry_id, [self._choice(chunk.index, part)], **more)
        if is_first:
            self._frames[chunk.index] = self._frame(chunk)
        return event

    def _frame(self, chunk: Chunk) -> tuple[str, str]:
        document = self._event(chunk.entry_id, [self._choice(chunk.index, self.text_part(_MARK))])
        before, _, after = document.data.rpartition(_SPELLED_MARK)
        return before, after

    def _finish(self, entry_id: str | None, choice: Choice, **more: object) -> Iterable[ServerSentEvent]:
        self._finished.add(choice.index)
        part = self.last_part(choice.index, is_first=choice.index not in self._frames)
        yield self._event(entry_id, [self._choice(choice.index, part, choice)], **more)

    def _choice(self, index: int, part: Document, ended: Choice | None = None) -> Document:
        choice: Document = {"index": index, "logprobs": None, **part, "finish_reason": None}
        if ended is not None:
            choice |= {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}
        return choice

    def _event(self, entry_id: str | None, choices: Sequence[Document], **more: object) -> ServerSentEvent:
        if self._created is None:
            self._created = created_at(entry_id)
        document: Document = {
            "id": self._completion_id,
            "object": self.kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        if self._shown.usage:
            document["usage"] = None
        return ServerSentEvent(spell(document | more))
