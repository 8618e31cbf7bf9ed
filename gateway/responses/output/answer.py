"""An answer as items, written one after the other: reasoning, a message, calls.

The output depends only on the chunks of the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from penstock.gateway.common.documents import Document
from penstock.gateway.responses.output.calls import call_of
from penstock.gateway.responses.output.items import ItemStatus, Message, OutputItem, Reasoning, UnnumberedEvent
from penstock.gateway.responses.tools import OfferedTool
from penstock.producer import Chunk, TokenLogprob, ToolCallDelta


class ResponseOutput:
    """The items so far. Only the last one is open."""

    def __init__(
        self, request_id: str, *, has_logprobs: bool = False, tools: Mapping[str, OfferedTool] = MappingProxyType({})
    ) -> None:
        self._request_id = request_id
        self._tools = tools
        self._has_logprobs = has_logprobs
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not come yet
        self._items: list[OutputItem] = []
        self._is_open = False

    @property
    def items(self) -> list[Document]:
        return [item.document() for item in self._items]

    def chunk(self, chunk: Chunk) -> Iterable[UnnumberedEvent]:
        if chunk.reasoning or chunk.tool_calls or self._has_logprobs or not self._is_text_open:
            return self._unusual(chunk)
        return (self._items[-1].delta(chunk.text),) if chunk.text else ()

    @property
    def _is_text_open(self) -> bool:
        return self._is_open and type(self._items[-1]) is Message

    def _unusual(self, chunk: Chunk) -> Iterator[UnnumberedEvent]:
        if chunk.reasoning:
            yield from self._open(Reasoning)
            yield self._items[-1].delta(chunk.reasoning)
        elif self._has_logprobs and chunk.logprobs:
            self._logprobs += chunk.logprobs
        if chunk.text:
            yield from self._open(Message)
            yield self._items[-1].delta(chunk.text, self._logprobs)
            self._logprobs = []
        for delta in chunk.tool_calls:
            yield from self._call(delta)

    def close(self, status: ItemStatus) -> Iterator[UnnumberedEvent]:
        """Yields the end of the last item."""
        if self._is_open:
            self._is_open = False
            yield from self._items[-1].close(status)

    def _open(self, kind: type[OutputItem]) -> Iterator[UnnumberedEvent]:
        """Begins a new item, unless the open one is of this kind."""
        if not self._is_open or type(self._items[-1]) is not kind:
            yield from self._begin(kind(self._request_id, len(self._items)))

    def _call(self, delta: ToolCallDelta) -> Iterator[UnnumberedEvent]:
        if delta.id is not None:
            tool = self._tools.get(delta.name or "") or OfferedTool({}, delta.name or "")
            yield from self._begin(call_of(self._request_id, len(self._items), delta.id, tool))
        if delta.arguments:
            yield from self._items[-1].argument(delta.arguments)

    def _begin(self, item: OutputItem) -> Iterator[UnnumberedEvent]:
        yield from self.close("completed")
        self._items.append(item)
        self._is_open = True
        yield from item.open()
