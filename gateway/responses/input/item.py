"""What all input items of a response have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import Body


class InputItem(Body, ABC):
    """An input item. `id` is the one that it had in an earlier answer, if it comes from one."""

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    prefix: ClassVar[str]  # of ids that items get here
    contents: ClassVar[tuple[str, ...]] = ()  # the fields that are the texts of parts

    @abstractmethod
    def shown(self) -> Document:
        """Returns the item without its id, as GET .../input_items shows it, and as it can be sent again."""

    @abstractmethod
    def add_to(self, messages: list[Document]) -> None:
        """Adds the item after the messages of earlier items."""


def turn_of(messages: list[Document], ends_with: Sequence[str]) -> Document:
    """Returns the assistant's current turn; a new one if there is none, or if it has one of `ends_with` already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in ends_with):
        messages.append({"role": "assistant"})
    return messages[-1]


def content_of(texts: Sequence[str]) -> str | list[Document]:
    """Returns a message's content."""
    return texts[0] if len(texts) == 1 else parts_of("text", texts)


def parts_of(kind: str, texts: Sequence[str]) -> list[Document]:
    return [{"type": kind, "text": text} for text in texts]
