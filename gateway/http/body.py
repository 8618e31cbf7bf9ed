"""Reads bodies of requests, within limits."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import HTTPConnection, Request

from penstock.gateway.errors import ApiError, unavailable
from penstock.protocol.wire.values import check_json, json_kind, spelled

SMALL_BYTES = 256 << 10
"""Bytes that every body may have: only the excess is taken from the budget. Parsing one holds up everything else."""

_GZIP = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 64 << 10
"""Bytes that are unpacked before they are counted."""


class BodyBudget:
    """Memory for large bodies in a process, while they arrive and until they are parsed, one after the other."""

    def __init__(self, max_bytes: int) -> None:
        self.parsing = asyncio.Lock()
        self._max_bytes = max_bytes
        self._num_held = 0

    @contextmanager
    def share(self) -> Iterator[_Share]:
        """Yields one body's share, during the block."""
        share = _Share(self)
        try:
            yield share
        finally:
            self._num_held -= share.num_held

    def take(self, num_bytes: int) -> None:
        """Takes bytes from the budget. Raises ApiError (503) if there are not enough."""
        if self._num_held + num_bytes > self._max_bytes:
            raise unavailable(f"too many large bodies come at once: together they are over {self._max_bytes} bytes")
        self._num_held += num_bytes


class _Share:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.num_held = 0

    def add(self, num_bytes: int) -> int:
        """Adds bytes, and returns the body's size so far.

        Raises:
            ApiError: the budget is exhausted (503).
        """
        self._num_bytes += num_bytes
        wanted = max(0, self._num_bytes - SMALL_BYTES)
        if wanted > self.num_held:
            self._budget.take(wanted - self.num_held)
            self.num_held = wanted
        return self._num_bytes


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Reads a body.

    Raises:
        ApiError: as soon as it is longer (413), or all bodies together exceed the process's budget (503).
    """
    with _budget_of(request).share() as share:
        return await _read(request, max_bytes, share)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in a body.

    Raises:
        ApiError: it is not one (400), or as `read_body`.
    """
    budget = _budget_of(request)
    with budget.share() as share:
        body = await _read(request, max_bytes, share)
        if len(body) <= SMALL_BYTES:
            return parse_object(body)
        async with budget.parsing:
            return await asyncio.to_thread(parse_object, body)


async def _read(request: Request, max_bytes: int, share: _Share) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and len(announced) < 20 and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    async for part in _unpacked(request):
        if share.add(len(part)) > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


async def _unpacked(request: Request) -> AsyncIterator[bytes]:
    """Yields the body in pieces, without gzip if it has that, so that the limit is on what comes out.

    Raises:
        ApiError: it is packed otherwise (415), or broken (400).
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        async for part in request.stream():
            yield part
        return
    if encoding not in ("gzip", "x-gzip"):
        message = f"content-encoding: is gzip or left out, not {spelled(encoding)}"
        raise ApiError(415, message, param="content-encoding", code="invalid_encoding")
    unpacking = zlib.decompressobj(_GZIP)
    async for part in request.stream():
        for piece in _pieces(unpacking, part):
            yield piece
    if not unpacking.eof:
        raise _not_gzip("it ends too early")
    yield unpacking.flush()


def _pieces(unpacking: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    while packed:
        try:
            yield unpacking.decompress(packed, _PIECE_BYTES)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        if unpacking.unused_data:
            raise _not_gzip("something follows its end")
        packed = unpacking.unconsumed_tail


def _not_gzip(reason: str) -> ApiError:
    message = f"the body is not gzip, which content-encoding says: {reason}"
    return ApiError(400, message, param="content-encoding", code="invalid_encoding")


def parse_object(body: bytes, what: str = "the body") -> dict[str, Any]:
    """Parses the JSON object in `body`.

    Raises:
        ApiError: it is not one (400).
    """
    try:
        value = check_json(from_json(body, allow_inf_nan=False))
    except ValueError as error:
        raise ApiError(400, f"{what} is not JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{what} is {json_kind(value)}, not an object", code="invalid_json")
    return value


def _budget_of(connection: HTTPConnection) -> BodyBudget:
    budget = connection.app.state.bodies
    assert isinstance(budget, BodyBudget)  # noqa: S101  the application is made with it
    return budget


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is over the limit of {max_bytes} bytes", code="too_large")
