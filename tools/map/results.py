"""Writes replies beside the columns of their rows. What an earlier run wrote is read back, except for a torn end."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_jsonable_python

from penstock.producer import BulkResult, Reply, RequestFailed
from penstock.tools.map.errors import MapError
from penstock.tools.map.rows import LONGEST_CELL
from penstock.tools.map.values import as_json, as_text

SYNC_INTERVAL_S = 1.0
ID = "reply_id"
COLUMNS = (
    "reply_row", ID, "reply_text", "reply_finish_reason", "reply_prompt_tokens", "reply_completion_tokens",
    "reply_reasoning", "reply_tool_calls", "reply_choices",
)  # fmt: skip
"""The columns of a reply. The last three are left out of JSON Lines where there are none, and are JSON in CSV."""


def as_columns(number: int, row_id: str, reply: Reply) -> dict[str, Any]:
    """Returns the columns of a row's reply. All choices are there if there are several, or log-probabilities."""
    has_more = len(reply.choices) > 1 or reply.choices[0].logprobs is not None
    more = {
        "reply_reasoning": reply.reasoning,
        "reply_tool_calls": to_jsonable_python(reply.tool_calls),
        "reply_choices": to_jsonable_python(reply.choices, exclude_none=True) if has_more else [],
    }
    usage = reply.usage
    counted = (number, row_id, reply.text, reply.finish_reason, usage.prompt_tokens, usage.completion_tokens)
    return dict(zip(COLUMNS, counted, strict=False)) | {name: value for name, value in more.items() if value}


def as_failure(number: int, columns: Mapping[str, Any], row_id: str, result: BulkResult) -> dict[str, Any]:
    """Returns the record of a row whose request ended without a whole reply; it has the text that there is."""
    reply, error = result.reply, result.error
    if isinstance(error, RequestFailed):
        reply = error.reply
    code = getattr(error, "code", None) or (
        type(error).__name__ if error is not None else reply and reply.finish_reason
    )
    message = f"the request was {code}" if error is None else getattr(error, "message", str(error))
    request_id = getattr(error, "request_id", None) or (row_id if reply is None else reply.request_id)
    where = {"reply_row": number, ID: row_id, "request_id": request_id}
    text = {"reply_text": reply.text} if reply is not None and reply.choices else {}
    return {**columns, **where, "code": code, "message": message, **text}


class AppendedFile(ABC):
    """A file that grows by whole records. A record that was cut off by a kill is dropped when it is opened.

    Raises:
        MapError: it can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced_s = time.monotonic()
        try:
            self._file = path.open("ab", buffering=0)
            end = self._end_of_records()
            self._file.truncate(end)
            if not end:
                self._write(self._head())
        except OSError as error:
            raise MapError(f"{path} can't be written: {error}") from error

    @abstractmethod
    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yields what earlier runs wrote. Raises MapError if it is not what they wrote."""

    @abstractmethod
    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Returns a record with the line break after it."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a record, and makes all records reach the disk within a second or so.

        Raises:
            MapError: it can't be written, for example because the disk is full.
        """
        try:
            self._write(self.encode(record))
            if time.monotonic() - self._synced_s >= SYNC_INTERVAL_S:
                self.sync()
        except OSError as error:
            raise MapError(f"{self.path} can't be written: {error}") from error

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Closes it, and leaves no empty file behind."""
        self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _head(self) -> bytes:
        """Returns what comes before the first record."""
        return b""

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def _end_of_records(self) -> int:
        """Returns the size without a record that was cut off: up to the last line break that ends one."""
        size = end = 0
        with self.path.open("rb") as file:
            for line in file:
                size += len(line)
                if self._ends_record(line):
                    end = size
        return end

    def _ends_record(self, line: bytes) -> bool:
        return line.endswith(b"\n")

    def _damaged(self, record: int, why: object) -> MapError:
        return MapError(f"{self.path}: record {record} is not what this command writes: {why}")


class JsonLinesFile(AppendedFile):
    """One JSON object a line."""

    def keep_last(self, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Keeps the last record of each row, if it should be kept.

        Raises:
            MapError: it can't be rewritten.
        """
        last = {record.get(ID): record for record in self.records()}
        beside = self.path.with_name(f"{self.path.name}.new")
        try:
            beside.write_bytes(b"".join(self.encode(each) for each in last.values() if is_kept(each)))
            beside.replace(self.path)
        except OSError as error:
            raise MapError(f"{beside} can't be written: {error}") from error

    def records(self) -> Iterator[Mapping[str, Any]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise self._damaged(number, error) from error
                if not isinstance(record, dict):
                    raise self._damaged(number, "it is not an object")
                yield record

    def encode(self, record: Mapping[str, Any]) -> bytes:
        try:
            return as_json(record).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can write
            return as_json(record, ensure_ascii=True).encode() + b"\n"


class CsvFile(AppendedFile):
    """Comma or tab separated values, with a header."""

    def __init__(self, path: Path, header: Sequence[str], delimiter: str) -> None:
        self._header = header
        self._delimiter = delimiter
        self._is_quoted = False  # whether a line break is inside quotes, up to the line that was read last
        super().__init__(path)

    def records(self) -> Iterator[Mapping[str, Any]]:
        csv.field_size_limit(LONGEST_CELL)
        number = 0
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                for number, record in enumerate(csv.reader(file, delimiter=self._delimiter, strict=True)):
                    if number == 0 and record != list(self._header):
                        raise self._damaged(1, f"the header has other columns than {', '.join(self._header)}")
                    if number:
                        yield dict(zip(self._header, record, strict=False))
        except (csv.Error, UnicodeDecodeError) as error:
            raise self._damaged(number + 1, error) from error

    def encode(self, record: Mapping[str, Any]) -> bytes:
        return self._line([as_text(record.get(name)) for name in self._header])

    def _head(self) -> bytes:
        return self._line(self._header)

    def _line(self, cells: Sequence[str]) -> bytes:
        line = io.StringIO()
        csv.writer(line, delimiter=self._delimiter, lineterminator="\n").writerow(cells)
        return line.getvalue().encode(errors="backslashreplace")

    def _ends_record(self, line: bytes) -> bool:
        self._is_quoted ^= line.count(b'"') % 2 == 1
        return line.endswith(b"\n") and not self._is_quoted
