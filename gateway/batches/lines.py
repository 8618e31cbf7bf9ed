"""The lines of a batch's input, one request each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.gateway.errors import ApiError
from penstock.gateway.http.body import SMALL_BYTES, parse_object
from penstock.protocol.wire.values import json_kind, spelled

MAX_CUSTOM_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request. `place` is the number of its line, from 1."""

    place: int
    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line as the file has it."""

    place: int
    data: bytes

    async def parsed(self, endpoint: str, max_bytes: int) -> BatchLine:
        """Parses the request.

        Raises:
            ApiError: it is not a request to `endpoint`.
        """
        await asyncio.sleep(0)  # parsing many lines in a row would block everything else
        if len(self.data) > max_bytes:
            raise ApiError(413, f"the line is over the limit of {max_bytes} bytes", code="too_large")
        what = "the line"
        if len(self.data) <= SMALL_BYTES:
            return _line(self.place, parse_object(self.data, what), endpoint)
        return _line(self.place, await asyncio.to_thread(parse_object, self.data, what), endpoint)


async def raw_lines(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[RawLine]:
    """Yields the lines that are not empty. A line longer than `max_bytes` is cut off, but stays longer than that."""
    place, rest = 0, b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for data in whole:
            place += 1
            if found := _raw(place, data):
                yield found
        rest = rest[: max_bytes + 1 + len(_BOM)]
    if found := _raw(place + 1, rest):
        yield found


def _raw(place: int, data: bytes) -> RawLine | None:
    data = (data.removeprefix(_BOM) if place == 1 else data).strip()
    return RawLine(place, data) if data else None


def _line(place: int, document: dict[str, Any], endpoint: str) -> BatchLine:
    for name in document.keys() - set(_FIELDS):
        raise ApiError(400, f"unknown field {name[:80]!r}", param=name[:80], code="unknown_parameter")
    for name in _FIELDS:
        if document.get(name) is None:
            raise ApiError(400, f"{name}: is missing", param=name, code="missing_required_parameter")
    custom_id, body = document["custom_id"], document["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters, not {spelled(custom_id)}"
        raise ApiError(400, message, param="custom_id", code="invalid_value")
    if document["method"] != "POST":
        message = f"method: must be POST, not {spelled(document['method'])}"
        raise ApiError(400, message, param="method", code="invalid_method")
    if document["url"] != endpoint:
        message = f"url: must be the batch's endpoint {endpoint}, not {spelled(document['url'])}"
        raise ApiError(400, message, param="url", code="invalid_url")
    if not isinstance(body, dict):
        raise ApiError(400, f"body: must be an object, not {json_kind(body)}", param="body", code="invalid_type")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise ApiError(400, "body.model: is missing", param="body.model", code="missing_required_parameter")
    return BatchLine(place, custom_id, body)
