"""Interruptions of answers from outside: the process drains, or an API key is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection

from penstock.gateway.errors import ApiError


class Interruption:
    """Interruption of one HTTP request: whether its answer is ended early, and what its client gets."""

    def __init__(self, key_id: str | None = None) -> None:
        self.key_id = key_id
        self._error: ApiError | None = None
        self._has_come = asyncio.Event()

    @property
    def error(self) -> ApiError | None:
        """The error; None: there is none so far."""
        return self._error

    def end(self, error: ApiError) -> None:
        """Ends the answer. The first error counts."""
        if self._error is None:
            self._error = error
            self._has_come.set()

    async def wait(self) -> ApiError:
        """Waits for the interruption, usually until cancelled."""
        await self._has_come.wait()
        assert self._error is not None  # noqa: S101  it is set before the event
        return self._error


class Interruptions:
    """Interruptions of all HTTP requests that a process is answering."""

    def __init__(self) -> None:
        self._open: set[Interruption] = set()
        self._for_all: ApiError | None = None

    @contextmanager
    def opened(self, key_id: str | None = None) -> Iterator[Interruption]:
        """Yields the interruption of a request with this key, while it is answered."""
        interruption = Interruption(key_id)
        if self._for_all is not None:
            interruption.end(self._for_all)
        self._open.add(interruption)
        try:
            yield interruption
        finally:
            self._open.discard(interruption)

    def end_all(self, error: ApiError) -> None:
        """Ends all answers, including those that begin later."""
        self._for_all = error
        for interruption in self._open:
            interruption.end(error)

    def end_key(self, key_id: str, error: ApiError) -> None:
        """Ends the answers to requests with this key. Later requests are up to the key check."""
        for interruption in self._open:
            if interruption.key_id == key_id:
                interruption.end(error)


def interruption_of(connection: HTTPConnection) -> Interruption:
    """Returns a request's interruption, which the middleware `KeyGuard` opens before any handler sees the request."""
    interruption = connection.state.interruption
    assert isinstance(interruption, Interruption)  # noqa: S101  the middleware has set it
    return interruption
