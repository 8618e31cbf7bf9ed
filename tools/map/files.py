"""Opens inputs and outputs by the endings of their names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from penstock.installed import how_to_install
from penstock.tools.map.errors import MapError
from penstock.tools.map.results import COLUMNS, AppendedFile, CsvFile, JsonLinesFile
from penstock.tools.map.rows import Csv, JsonLines, Rows

JSON_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
ENDINGS = (*JSON_LINES, *DELIMITERS, PARQUET)


def open_rows(path: Path) -> Rows:
    """Opens an input.

    Raises:
        MapError: it is of an unknown kind, can't be read, or needs a package that is missing.
    """
    suffix = _kind(path)
    if suffix in JSON_LINES:
        return JsonLines(path)
    if suffix in DELIMITERS:
        return Csv(path, DELIMITERS[suffix])
    rows: Rows = _parquet(path).ParquetRows(path)
    return rows


def check_output(path: Path, rows: Rows) -> None:
    """Checks that an output of this name has a place for the columns of these rows.

    Raises:
        MapError: its kind is unknown, or needs a package that is missing; or it needs columns that all rows have in
            common, and these have none.
    """
    suffix = _kind(path)
    if suffix not in JSON_LINES and rows.header is None:
        raise MapError(
            f"{path}: the columns of CSV and Parquet are those of the input, and {rows.path} has none for all rows: "
            "write .jsonl"
        )
    if suffix == PARQUET:
        _parquet(path)


def open_results(path: Path, rows: Rows) -> AppendedFile:
    """Opens the output for the replies to these rows, which `check_output` has passed.

    Raises:
        MapError: it can't be written.
    """
    suffix = _kind(path)
    if rows.header is None or suffix in JSON_LINES:
        return JsonLinesFile(path)
    if suffix in DELIMITERS:
        return CsvFile(path, [*rows.header, *COLUMNS], DELIMITERS[suffix])
    results: AppendedFile = _parquet(path).ParquetResults(path, rows)
    return results


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in ENDINGS:
        raise MapError(f"{path}: {suffix or 'a name without an ending'} is not one of {', '.join(ENDINGS)}")
    return suffix


def _parquet(path: Path) -> ModuleType:
    try:
        from penstock.tools.map import parquet
    except ImportError as error:
        raise MapError(f"{path} needs pyarrow: {how_to_install('parquet')}") from error
    return parquet
