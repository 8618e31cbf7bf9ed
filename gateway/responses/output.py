"""An answer as items, written one after the other: reasoning, a message, function calls.

The output depends only on the chunks of the reply. Each part is an event's type and fields, as JSON without the braces.
Nearly all are deltas, whose fields except the text are written once per item.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from pydantic_core import from_json

from penstock.gateway.common.documents import Document, spell
from penstock.gateway.responses.tools import INPUT, OfferedTool
from penstock.producer import Chunk, TokenLogprob, ToolCallDelta, TopLogprob

_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class UnnumberedEvent(NamedTuple):
    """An event without its number. `fields` is JSON without the braces around it."""

    type: str
    fields: str


def part(type_: str, **fields: object) -> UnnumberedEvent:
    return UnnumberedEvent(type_, spell(fields)[1:-1])


class ResponseOutput:
    """The items so far. Only the last one is open."""

    def __init__(
        self, request_id: str, *, has_logprobs: bool = False, tools: Mapping[str, OfferedTool] = MappingProxyType({})
    ) -> None:
        self._request_id = request_id
        self._tools = tools
        self._has_logprobs = has_logprobs
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not come yet
        self._items: list[_Item] = []
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
        return self._is_open and type(self._items[-1]) is _Message

    def _unusual(self, chunk: Chunk) -> Iterator[UnnumberedEvent]:
        if chunk.reasoning:
            yield from self._open(_Reasoning)
            yield self._items[-1].delta(chunk.reasoning)
        elif self._has_logprobs and chunk.logprobs:
            self._logprobs += chunk.logprobs
        if chunk.text:
            yield from self._open(_Message)
            yield self._items[-1].delta(chunk.text, self._logprobs)
            self._logprobs = []
        for delta in chunk.tool_calls:
            yield from self._call(delta)

    def close(self, status: _ItemStatus) -> Iterator[UnnumberedEvent]:
        """Yields the end of the last item."""
        if self._is_open:
            self._is_open = False
            yield from self._items[-1].close(status)

    def _open(self, kind: type[_Item]) -> Iterator[UnnumberedEvent]:
        """Begins a new item, unless the open one is of this kind."""
        if not self._is_open or type(self._items[-1]) is not kind:
            yield from self._begin(kind(self._request_id, len(self._items)))

    def _call(self, delta: ToolCallDelta) -> Iterator[UnnumberedEvent]:
        if delta.id is not None:
            tool = self._tools.get(delta.name or "") or OfferedTool({}, delta.name or "")
            kind = _CustomCall if tool.is_custom else _Call
            yield from self._begin(kind(self._request_id, len(self._items), delta.id, tool))
        if delta.arguments:
            yield from self._items[-1].argument(delta.arguments)

    def _begin(self, item: _Item) -> Iterator[UnnumberedEvent]:
        yield from self.close("completed")
        self._items.append(item)
        self._is_open = True
        yield from item.open()


class _Item(ABC):
    """One item, from its beginning."""

    prefix: ClassVar[str]  # of its id
    name: ClassVar[str]  # of the events for its content

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.index = index
        self._texts: list[str] = []
        self._status: _ItemStatus = "in_progress"
        self._frame = spell(self._place())[1:-1] + ',"delta":'

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def document(self) -> Document: ...

    def open(self) -> Iterator[UnnumberedEvent]:
        yield part("response.output_item.added", output_index=self.index, item=self.document())

    def delta(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> UnnumberedEvent:
        self._texts.append(text)
        return UnnumberedEvent(f"response.{self.name}.delta", self._frame + spell(text))

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        """Yields the delta of a piece of a call's arguments, if it has something to read."""
        yield self.delta(text)

    def close(self, status: _ItemStatus) -> Iterator[UnnumberedEvent]:
        yield self._done()
        self._status = status
        yield part("response.output_item.done", output_index=self.index, item=self.document())

    @abstractmethod
    def _done(self) -> UnnumberedEvent: ...

    def _place(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}


class _TextItem(_Item):
    """An item with a single content: a text."""

    def _place(self) -> Document:
        return {**super()._place(), "content_index": 0}

    def open(self) -> Iterator[UnnumberedEvent]:
        yield from super().open()
        yield part("response.content_part.added", **self._place(), part=self._content())

    def close(self, status: _ItemStatus) -> Iterator[UnnumberedEvent]:
        yield self._done()
        yield part("response.content_part.done", **self._place(), part=self._content())
        self._status = status
        yield part("response.output_item.done", output_index=self.index, item=self.document())

    @abstractmethod
    def _content(self) -> Document: ...

    def _contents(self) -> list[Document]:
        return [self._content()] if self._texts else []

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), text=self.text)


class _Reasoning(_TextItem):
    prefix = "rs"
    name = "reasoning_text"

    def document(self) -> Document:
        return {
            "id": self.id, "type": "reasoning", "summary": [], "content": self._contents(), "status": self._status,
        }  # fmt: skip

    def _content(self) -> Document:
        return {"type": "reasoning_text", "text": self.text}


class _Message(_TextItem):
    prefix = "msg"
    name = "output_text"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self._logprobs: list[Document] = []

    def document(self) -> Document:
        return {
            "id": self.id, "type": "message", "role": "assistant", "content": self._contents(), "status": self._status,
        }  # fmt: skip

    def delta(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> UnnumberedEvent:
        self._texts.append(text)
        if not logprobs:
            return UnnumberedEvent("response.output_text.delta", f'{self._frame}{spell(text)},"logprobs":[]')
        shown = [_logprob(token) for token in logprobs]
        self._logprobs += shown
        return UnnumberedEvent("response.output_text.delta", f'{self._frame}{spell(text)},"logprobs":{spell(shown)}')

    def _content(self) -> Document:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), text=self.text, logprobs=self._logprobs)


class _Call(_Item):
    prefix = "fc"
    name = "function_call_arguments"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index)
        self._call_id = call_id
        self._tool = tool

    def document(self) -> Document:
        return {
            "id": self.id,
            "type": "function_call",
            **self._called(),
            "arguments": self.text,
            "status": self._status,
        }

    def _called(self) -> Document:
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        return {"call_id": self._call_id, "name": self._tool.name, **namespace}

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), name=self._tool.name, arguments=self.text)


class _CustomCall(_Call):
    """A call of a custom tool: its text is inside of the function's arguments."""

    prefix = "ctc"
    name = "custom_tool_call_input"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._arguments = ""

    def document(self) -> Document:
        return {
            "id": self.id, "type": "custom_tool_call", **self._called(), "input": self.text, "status": self._status,
        }  # fmt: skip

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        self._arguments += text
        if more := _input_in(self._arguments)[len(self.text) :]:
            yield self.delta(more)

    def close(self, status: _ItemStatus) -> Iterator[UnnumberedEvent]:
        if self._arguments and f'"{INPUT}"' not in self._arguments:  # the model wrote something else: nothing is lost
            yield self.delta(self._arguments)
        yield from super().close(status)

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), input=self.text)


def _input_in(arguments: str) -> str:
    """Returns a custom tool's text as far as it is written."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    given = value.get(INPUT) if isinstance(value, dict) else None
    return given if isinstance(given, str) else ""


def _logprob(token: TokenLogprob) -> Document:
    return {**_one(token), "top_logprobs": [_one(other) for other in token.top]}


def _one(token: TopLogprob) -> Document:
    return {"token": token.token, "bytes": list(token.bytes), "logprob": token.logprob}
