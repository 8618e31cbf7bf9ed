"""Collects the names of a request's fields that have no effect, for a header of its answer, and once for the log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.once import Once
from penstock.producer import GenerateRequest, ModelCard

HEADER = "x-penstock-ignored"
MAX_NAMES = 16
"""Limit on the names reported for one request; the rest are only counted."""

MAX_NAME_CHARS = 64

_log = structlog.get_logger(__name__)
_logged = Once()
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(slots=True)
class PassedOver:
    """How one request's fields are read, and which of them were passed over so far."""

    is_strict: bool = False  # unknown fields are refused
    _names: dict[str, None] = field(default_factory=dict)
    _num_more: int = 0

    def add(self, place: str) -> None:
        """Notes the field at a place. The same one in another message is not reported again."""
        name = _UNSAFE.sub("?", _INDEX.sub("", place))[:MAX_NAME_CHARS]
        if name in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[name] = None
        else:
            self._num_more += 1

    @property
    def said(self) -> str:
        """The names in the form of the header; empty: there are none."""
        return ", ".join([*self._names, *([f"+{self._num_more}"] if self._num_more else [])])

    def log(self, api: str) -> None:
        """Logs the names that are new for this API, on one line."""
        new = [name for name in self._names if _logged.is_new((api, name))]
        if new:
            _log.info("fields_passed_over", api=api, fields=new)


_current: ContextVar[PassedOver | None] = ContextVar("passed_over", default=None)


@contextmanager
def reading_fields(*, is_strict: bool) -> Iterator[PassedOver]:
    """Yields the notes on one request, which is read during the block."""
    notes = PassedOver(is_strict)
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def pass_over(place: str) -> None:
    """Notes that the field at a place was passed over."""
    if (notes := _current.get()) is not None:
        notes.add(place)


def pass_over_unshown(card: ModelCard | None, requests: Iterable[GenerateRequest]) -> None:
    """Notes the fields that the model is not shown: tools, if the card says that its chat template has no place for
    them. The reply says the same (`Reply.ignored`), but headers come first.
    """
    if card is not None and not card.shows_tools and any(request.tools for request in requests):
        pass_over("tools")


def is_strict() -> bool:
    """Whether the request that is read may have no unknown fields."""
    notes = _current.get()
    return notes is not None and notes.is_strict


class NotesOnFields:
    """Notes what handlers pass over.

    Args:
        app: the application that it wraps.
        is_strict: whether unknown fields are refused.
    """

    def __init__(self, app: ASGIApp, *, is_strict: bool) -> None:
        self._app = app
        self._is_strict = is_strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with reading_fields(is_strict=self._is_strict) as notes:

            async def say(message: Message) -> None:
                if message["type"] == "http.response.start" and notes.said:
                    MutableHeaders(scope=message)[HEADER] = notes.said
                    notes.log(str(getattr(scope.get("route"), "path", "none")))
                await send(message)

            await self._app(scope, receive, say)
