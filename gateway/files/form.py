"""Reads `multipart/form-data` (RFC 7578) as it arrives: the file is passed on piece by piece, and no part can grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from penstock.gateway.errors import ApiError
from penstock.gateway.files.names import file_name
from penstock.gateway.settings import MAX_FILE_S, MIN_FILE_S

MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
FILE = "file"


class PartSink(Protocol):
    async def write(self, data: bytes) -> None: ...


class Form:
    """The parts of a form other than its file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None


async def read_form(asked: Request, sink: PartSink) -> Form:
    """Reads a form whose part `file` goes to `sink`.

    Raises:
        ApiError: it is not a form, or exceeds a limit (400).
        Whatever `sink` raises.
    """
    reader, boundary = _Reader(), _boundary(asked)
    try:
        parser = MultipartParser(boundary, reader.callbacks, max_header_count=8, max_header_size=4096)
        async for data in asked.stream():
            if data:
                parser.write(data)
                await _pass_on(reader, sink)
        parser.finalize()
    except FormParserError as error:
        raise _malformed(str(error)) from None
    if not reader.has_ended:
        raise _malformed("it ends too early")
    return reader.form


async def _pass_on(reader: _Reader, sink: PartSink) -> None:
    parts, reader.file_parts = reader.file_parts, []
    for part in parts:
        await sink.write(part)


class _Reader:
    """Receives the parser's callbacks."""

    def __init__(self) -> None:
        self.form = Form()
        self.file_parts: list[bytes] = []
        self.has_ended = False
        self._num_parts = 0
        self._name: str | None = None
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""

    @property
    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""
        self._value.clear()

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""))
        if not self._name:
            raise _malformed("a part of it has no name")
        if self._name in self.form.fields or (self._name == FILE and self.form.filename is not None):
            raise _malformed(f"it has two parts {self._name[:80]!r}")
        if self._name == FILE:
            self.form.filename = file_name(_text(options.get(b"filename", b"")))

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.file_parts.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise _malformed(f"the part {(self._name or '')[:80]!r} is over {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name is not None and self._name != FILE:
            self.form.fields[self._name] = _text(bytes(self._value))

    def _end(self) -> None:
        self.has_ended = True


def _boundary(asked: Request) -> bytes:
    kind, options = parse_options_header(asked.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(
            400, "a file comes as multipart/form-data, with the fields file and purpose", code="invalid_form"
        )
    return options[b"boundary"]


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _malformed("a name or a field of it is not UTF-8") from None


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the form can't be read: {reason}"[:300], code="invalid_form")


def seconds_of(fields: Mapping[str, str]) -> int | None:
    """Returns `expires_after`; None: it was left out.

    Raises:
        ApiError: it is malformed, or no file may be kept for so long.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        message = f"expires_after.anchor: must be created_at, not {(anchor or '')[:80]!r}"
        raise ApiError(400, message, param="expires_after.anchor", code="invalid_value")
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 12):
        message = f"expires_after.seconds: must be a number, not {(seconds or '')[:80]!r}"
        raise ApiError(400, message, param="expires_after.seconds", code="invalid_value")
    check_ttl(int(seconds), "expires_after.seconds")
    return int(seconds)


def check_ttl(ttl_s: int, param: str) -> None:
    """Raises ApiError if no file may be kept for so long."""
    if not MIN_FILE_S <= ttl_s <= MAX_FILE_S:
        message = f"{param}: must be a number from {MIN_FILE_S} to {MAX_FILE_S}, not {ttl_s}"
        raise ApiError(400, message, param=param, code="invalid_value")
