"""The items of an answer, each written from its beginning to its end: reasoning and messages.

Each event is a type and fields, as JSON without the braces. Nearly all are deltas, whose fields except the text are
written once per item.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from penstock.gateway.common.documents import Document, spell
from penstock.producer import TokenLogprob, TopLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class UnnumberedEvent(NamedTuple):
    """An event without its number. `fields` is JSON without the braces around it."""

    type: str
    fields: str


def part(type_: str, **fields: object) -> UnnumberedEvent:
    return UnnumberedEvent(type_, spell(fields)[1:-1])


class OutputItem(ABC):
    """One item, from its beginning."""

    prefix: ClassVar[str]  # of its id
    name: ClassVar[str]  # of the events for its content

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.index = index
        self._texts: list[str] = []
        self._status: ItemStatus = "in_progress"
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

    def close(self, status: ItemStatus) -> Iterator[UnnumberedEvent]:
        yield from self._close_content()
        self._status = status
        yield part("response.output_item.done", output_index=self.index, item=self.document())

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        """Yields what comes before the item's own end."""
        yield self._done()

    @abstractmethod
    def _done(self) -> UnnumberedEvent: ...

    def _place(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}


class TextItem(OutputItem):
    """An item with a single content: a text."""

    def _place(self) -> Document:
        return {**super()._place(), "content_index": 0}

    def open(self) -> Iterator[UnnumberedEvent]:
        yield from super().open()
        yield part("response.content_part.added", **self._place(), part=self._content())

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        yield from super()._close_content()
        yield part("response.content_part.done", **self._place(), part=self._content())

    @abstractmethod
    def _content(self) -> Document: ...

    def _contents(self) -> list[Document]:
        return [self._content()] if self._texts else []

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), text=self.text)


class Reasoning(TextItem):
    prefix = "rs"
    name = "reasoning_text"

    def document(self) -> Document:
        return {
            "id": self.id, "type": "reasoning", "summary": [], "content": self._contents(), "status": self._status,
        }  # fmt: skip

    def _content(self) -> Document:
        return {"type": "reasoning_text", "text": self.text}


class Message(TextItem):
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


def _logprob(token: TokenLogprob) -> Document:
    return {**_one(token), "top_logprobs": [_one(other) for other in token.top]}


def _one(token: TopLogprob) -> Document:
    return {"token": token.token, "bytes": list(token.bytes), "logprob": token.logprob}
