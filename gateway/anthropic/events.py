"""A message as events: https://platform.claude.com/docs/en/build-with-claude/streaming.

Blocks are written one after the other. Nearly all events are deltas, whose frame around the text is built once per
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.gateway.anthropic.documents import ending, message_id, opened, usage
from penstock.gateway.anthropic.errors import error_body
from penstock.gateway.common.documents import Document, check_ended, spell
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import ServerSentEvent
from penstock.producer import Chunk, Reply, ToolCallDelta

_PING = ServerSentEvent('{"type":"ping"}', "ping")


class MessageEvents:
    """Writes the events of one reply.

    Args:
        request_id: the id of the reply.
        model: the name that the client used.
        shows_thinking: whether reasoning is shown.
        http_request_id: the id that errors have.
    """

    def __init__(self, request_id: str, model: str, *, shows_thinking: bool, http_request_id: str) -> None:
        self._id = message_id(request_id)
        self._model = model
        self._shows_thinking = shows_thinking
        self._http_request_id = http_request_id
        self._has_begun = False
        self._index = -1  # of the last block
        self._open_kind: str | None = None  # kind of the open delta
        self._frame = ""  # precedes the text of its deltas

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent]:
        if self._open_kind == "text" and not (chunk.reasoning or chunk.tool_calls):
            return (self._delta(chunk.text),) if chunk.text else ()
        return self._unusual(chunk)

    def end(self, reply: Reply) -> Iterable[ServerSentEvent]:
        check_ended(reply)
        yield from self._begin()
        yield from self._close()
        yield _event("message_delta", delta=ending(reply.choices[0]), usage=usage(reply.usage))
        yield _event("message_stop")

    def error(self, error: ApiError) -> Iterable[ServerSentEvent]:
        yield ServerSentEvent(spell(error_body(error, self._http_request_id)), "error")

    def _unusual(self, chunk: Chunk) -> Iterator[ServerSentEvent]:
        yield from self._begin()
        if chunk.reasoning and self._shows_thinking:
            yield from self._turn_to("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(chunk.reasoning)
        if chunk.text:
            yield from self._turn_to("text", {"type": "text", "text": ""})
            yield self._delta(chunk.text)
        for call in chunk.tool_calls:
            yield from self._call(call)

    def _begin(self) -> Iterator[ServerSentEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message=opened(self._id, self._model))
            yield _PING

    def _call(self, call: ToolCallDelta) -> Iterator[ServerSentEvent]:
        if call.id is not None:
            yield from self._open("partial_json", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            yield self._delta(call.arguments)

    def _turn_to(self, kind: str, block: Document) -> Iterator[ServerSentEvent]:
        if self._open_kind != kind:
            yield from self._open(kind, block)

    def _open(self, kind: str, block: Document) -> Iterator[ServerSentEvent]:
        yield from self._close()
        self._index += 1
        self._open_kind = kind
        delta = {"type": "input_json_delta" if kind == "partial_json" else f"{kind}_delta", kind: ""}
        frame = spell({"type": "content_block_delta", "index": self._index, "delta": delta})
        self._frame = frame.removesuffix('""}}')
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, text: str) -> ServerSentEvent:
        return ServerSentEvent(f"{self._frame}{spell(text)}}}}}", "content_block_delta")

    def _close(self) -> Iterator[ServerSentEvent]:
        if self._open_kind is None:
            return
        if self._open_kind == "thinking":
            signature = {"type": "signature_delta", "signature": self._id}
            yield _event("content_block_delta", index=self._index, delta=signature)
        self._open_kind = None
        yield _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: object) -> ServerSentEvent:
    return ServerSentEvent(spell({"type": kind, **fields}), kind)
