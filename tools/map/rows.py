"""Reads the rows of an input: JSON Lines, or CSV with a header."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.tools.map.errors import MapError

LONGEST_CELL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the input.

    Attributes:
        number: counted from 1, without the header and empty lines.
        columns: what it holds, by column.
        content: the same as bytes; a row that makes no request gets its id from these.
        problem: why it makes no request; None: it may make one.
    """

    number: int
    columns: Mapping[str, Any]
    content: bytes
    problem: str | None = None


class Rows(ABC):
    """The rows of a file; each iteration reads it again.

    Attributes:
        path: the file.
        header: its columns, if all rows have the same.
    """

    header: tuple[str, ...] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self) -> int:
        """Returns how many rows there are. Raises what iterating over them raises."""
        return sum(1 for _ in self)

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """Yields the rows.

        Raises:
            MapError: the file can't be read, or what follows can't be told apart.
        """


class JsonLines(Rows):
    """One JSON value a line: an object of columns, a prompt, or the messages of a chat."""

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            with self.path.open("rb") as file:
                for at, line in enumerate(file, start=1):
                    content = line.strip().removeprefix(b"\xef\xbb\xbf")
                    if content:
                        number += 1
                        yield self._row(number, at, content)
        except OSError as error:
            raise MapError(f"{self.path} can't be read: {error}") from error

    def count(self) -> int:
        try:
            with self.path.open("rb") as file:
                return sum(1 for line in file if line.strip())
        except OSError as error:
            raise MapError(f"{self.path} can't be read: {error}") from error

    def _row(self, number: int, line: int, content: bytes) -> Row:
        try:
            value = json.loads(content, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return Row(number, {}, content, f"line {line} is not JSON: {error}")
        if isinstance(value, str):
            value = {"prompt": value}
        elif isinstance(value, list):
            value = {"messages": value}
        if not isinstance(value, dict):
            return Row(number, {}, content, f"line {line} is neither an object nor a prompt")
        return Row(number, value, content)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Csv(Rows):
    """Comma or tab separated values in UTF-8, the first record being the header."""

    def __init__(self, path: Path, delimiter: str) -> None:
        super().__init__(path)
        self._delimiter = delimiter
        self.header: tuple[str, ...] = next(self._records(), ())
        if not self.header:
            raise MapError(f"{path} has no header")
        twice = [name for name in self.header if self.header.count(name) > 1]
        if twice:
            raise MapError(f"{path}: column {twice[0]!r} is in the header twice")

    def __iter__(self) -> Iterator[Row]:
        records = self._records()
        next(records, None)
        for number, record in enumerate(records, start=1):
            content = json.dumps(record).encode()
            if len(record) == len(self.header):
                yield Row(number, dict(zip(self.header, record, strict=True)), content)
            else:
                problem = f"row {number} has {len(record)} columns, the header {len(self.header)}"
                yield Row(number, dict(zip(self.header, record, strict=False)), content, problem)

    def _records(self) -> Iterator[tuple[str, ...]]:
        csv.field_size_limit(LONGEST_CELL)
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                for record in csv.reader(file, delimiter=self._delimiter, strict=True):
                    if record:
                        yield tuple(record)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise MapError(f"{self.path} can't be read: {error}") from error
