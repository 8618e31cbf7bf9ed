"""Parquet, read and written. It needs the extra `parquet`.

A Parquet file ends with its index, so it can't grow. Records go to an Arrow stream beside it, which becomes the file
when the run ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.tools.map.errors import MapError
from penstock.tools.map.results import COLUMNS, AppendedFile
from penstock.tools.map.rows import Row, Rows
from penstock.tools.map.values import as_json, as_text

BATCH_ROWS = 1024
GROUP_ROWS = 32_768
_NUMBERS = frozenset({"reply_row", "reply_prompt_tokens", "reply_completion_tokens"})


class ParquetRows(Rows):
    """The rows of a Parquet file.

    Attributes:
        schema: its columns and their types.

    Raises:
        MapError: it can't be read, or two columns have one name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._opened() as file:
            self.schema = _without_dictionaries(file.schema_arrow)
        self.header = tuple(self.schema.names)
        twice = [name for name in self.header if self.header.count(name) > 1]
        if twice:
            raise MapError(f"{path}: there are two columns called {twice[0]!r}")

    def count(self) -> int:
        with self._opened() as file:
            return int(file.metadata.num_rows)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            with self._opened() as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    for columns in batch.to_pylist():
                        number += 1
                        yield Row(number, columns, as_json(columns).encode(errors="backslashreplace"))
        except (OSError, ValueError, pa.ArrowException) as error:  # nanoseconds have no type in Python: a ValueError
            raise MapError(f"{self.path} can't be read: {error}") from error

    def _opened(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise MapError(f"{self.path} can't be read: {error}") from error


class ParquetResults(AppendedFile):
    """A Parquet file of the input's columns and the replies'.

    While a run goes on, its records are in a stream beside it: a schema, then a batch of one row each, in the format of
    Arrow's inter-process communication.
    """

    def __init__(self, target: Path, rows: Rows) -> None:
        self._target = target
        self._schema = _schema_of(rows)
        stream = target.with_name(f"{target.name}.rows")
        try:
            self._check_schema(stream)
            if target.exists() and not stream.exists():
                _reopen(target, stream)
            super().__init__(stream)
        except pa.ArrowException as error:
            raise MapError(f"{target} can't be written: {error}") from error

    def records(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._batches():
            yield from batch.to_pylist()

    def encode(self, record: Mapping[str, Any]) -> bytes:
        values = {name: self._value(name, record.get(name)) for name in self._schema.names}
        try:
            batch = pa.RecordBatch.from_pylist([values], schema=self._schema)
            return bytes(batch.serialize().to_pybytes())
        except (pa.ArrowException, OverflowError) as error:
            raise MapError(f"{self._target}: row {record.get('reply_row')} can't be written: {error}") from error

    def close(self) -> None:
        """Makes the file from the stream, then deletes the stream."""
        super().close()
        beside = self._target.with_name(f"{self._target.name}.new")
        try:
            with pq.ParquetWriter(beside, self._schema) as writer:
                group: list[pa.RecordBatch] = []
                for batch in self._batches():
                    group.append(batch)
                    if len(group) == GROUP_ROWS:
                        writer.write_table(pa.Table.from_batches(group).combine_chunks())
                        group.clear()
                writer.write_table(pa.Table.from_batches(group, self._schema).combine_chunks())
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(self._target)
            self.path.unlink()
        except (OSError, pa.ArrowException) as error:
            raise MapError(f"{beside} can't be written: {error}; run the same command to continue") from error

    def _check_schema(self, stream: Path) -> None:
        schema = _schema_in(stream) or (pq.read_schema(self._target) if self._target.exists() else self._schema)
        if not schema.equals(self._schema):
            names = ", ".join(f"{field.name} ({field.type})" for field in self._schema)
            raise MapError(f"{self._target} has other columns than {names}: name another output")

    def _value(self, name: str, value: Any) -> Any:
        if name in COLUMNS and name not in _NUMBERS and value is not None:
            value = as_text(value)
        return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value

    def _head(self) -> bytes:
        return bytes(self._schema.serialize().to_pybytes())

    def _end_of_records(self) -> int:
        end = 0
        with self.path.open("rb") as file:
            messages = pa.ipc.MessageReader.open_stream(file)
            try:
                while True:
                    messages.read_next_message()
                    end = file.tell()
            except (StopIteration, OSError, pa.ArrowException):
                return end

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with self.path.open("rb") as file:
            messages = pa.ipc.MessageReader.open_stream(file)
            schema = pa.ipc.read_schema(messages.read_next_message())
            for message in messages:
                yield pa.ipc.read_record_batch(message, schema)


def _schema_of(rows: Rows) -> pa.Schema:
    fields = (
        list(rows.schema)
        if isinstance(rows, ParquetRows)
        else [pa.field(name, pa.string()) for name in rows.header or ()]
    )
    return pa.schema([*fields, *(pa.field(name, pa.int64() if name in _NUMBERS else pa.string()) for name in COLUMNS)])


def _schema_in(stream: Path) -> pa.Schema | None:
    """Returns the schema of a stream; None: there is none, or a kill cut it off."""
    if not stream.exists():
        return None
    with stream.open("rb") as file:
        try:
            return pa.ipc.read_schema(pa.ipc.MessageReader.open_stream(file).read_next_message())
        except (StopIteration, OSError, pa.ArrowException):
            return None


def _reopen(target: Path, stream: Path) -> None:
    """Makes a stream from what earlier runs wrote."""
    beside = stream.with_name(f"{stream.name}.new")
    with pq.ParquetFile(target) as file, beside.open("wb") as out:
        out.write(file.schema_arrow.serialize().to_pybytes())
        for batch in file.iter_batches():
            out.write(batch.serialize().to_pybytes())
    beside.replace(stream)


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """Returns a schema whose values are in the batches themselves, not in one before them."""
    plain = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    return pa.schema(plain)
