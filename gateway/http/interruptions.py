"""What ends answers from outside: the process drains, or an API key is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection

from penstock.gateway.errors import ApiError


class Interruption:
    """One HTTP request's: whether something ends its answer before the answer's own end, and what its client gets."""

    def __init__(self, key_id: str | None = None) -> None:
        self.key_id = key_id
        self._error: ApiError | None = None
        self._has_come = asyncio.Event()

    @property
    def error(self) -> ApiError | None:
        """None: nothing has come so far."""
        return self._error

    def end(self, error: ApiError) -> None:
        """The first error is the one that counts."""
        if self._error is None:
            self._error = error
            self._has_come.set()

    async def wait(self) -> ApiError:
        """Waits for it, mostly until cancelled."""
        await self._has_come.wait()
        assert self._error is not None  # noqa: S101  it is set before the event
        return self._error


class Interruptions:
    """Those of all HTTP requests that a process answers now."""

    def __init__(self) -> None:
        self._open: set[Interruption] = set()
        self._for_all: ApiError | None = None

    @contextmanager
    def opened(self, key_id: str | None = None) -> Iterator[Interruption]:
        """One for a request that a caller with this key makes, while the request is answered."""
        interruption = Interruption(key_id)
        if self._for_all is not None:
            interruption.end(self._for_all)
        self._open.add(interruption)
        try:
            yield interruption
        finally:
            self._open.discard(interruption)

    def end_all(self, error: ApiError) -> None:
        """Ends all answers, those that begin later as well."""
        self._for_all = error
        for interruption in self._open:
            interruption.end(error)

    def end_key(self, key_id: str, error: ApiError) -> None:
        """Ends the answers to those who came with this key. Who comes later is for whoever checks keys."""
        for interruption in self._open:
            if interruption.key_id == key_id:
                interruption.end(error)


def interruption_of(connection: HTTPConnection) -> Interruption:
    """That of a request, which `gateway/keys` has opened before any handler sees the request."""
    interruption = connection.state.interruption
    assert isinstance(interruption, Interruption)  # noqa: S101  the middleware has set it
    return interruption
