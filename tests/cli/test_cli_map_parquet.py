"""`penstock map` from and to Parquet, which can't grow: what a killed run had written is in a stream beside it."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.tools.map import files
from penstock.tools.map.errors import MapError
from penstock.tools.map.results import COLUMNS
from tests.cli.test_cli_map import CHAT, lines, names_in, redis_url, run, shout, write
from tests.support.programs.fakes import ScriptedWorker

pa = pytest.importorskip("pyarrow", reason="NOT CHECKED, the extra `parquet` is not installed")
pq = pytest.importorskip("pyarrow.parquet")

__all__ = ["redis_url"]

WHEN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
VALUES: dict[str, list[Any]] = {
    "text": ["one", "two", None],
    "when": [WHEN, None, WHEN],
    "price": [decimal.Decimal("1.50"), None, decimal.Decimal("2.00")],
    "raw": [b"\xff", None, b""],
    "score": [float("nan"), 1.5, None],
    "kind": ["a", "b", "a"],
    "tags": [["x"], [], None],
}


def table() -> Any:
    return pa.table({**VALUES, "kind": pa.array(VALUES["kind"]).dictionary_encode()})


async def test_columns_keep_their_types_and_rows_that_fail_are_told(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table(), source)
    template = ("--plain", "--template", "{text} at {when} for {price}, {tags}")
    async with ScriptedWorker(redis_url, shout) as worker:
        outcome = await run(redis_url, source, output, *template, "--n", 2)
        again = await run(redis_url, source, output, *template, "--n", 2)
    assert (outcome.status, again.status, len(worker.taken)) == (1, 1, 1)
    assert worker.taken[0].prompt == 'one at 2026-01-02T03:04:05Z for 1.50, ["x"]'
    assert names_in(tmp_path) == ["in.parquet", "out.parquet", "out.parquet.failures.jsonl", "out.parquet.job"]
    written = pq.read_table(output)
    assert written.schema.names == [*VALUES, *COLUMNS]
    assert [written.schema.field(name).type for name in ("when", "price", "kind", "reply_row")] == [
        pa.timestamp("us", "UTC"), pa.decimal128(3, 2), pa.string(), pa.int64(),
    ]  # fmt: skip
    (row,) = written.to_pylist()
    assert (row["when"], row["price"], row["raw"]) == (WHEN, decimal.Decimal("1.50"), b"\xff")
    assert row["score"] != row["score"]
    assert len(json.loads(row["reply_choices"])) == 2
    failed = {each["reply_row"]: each for each in lines(tmp_path / "out.parquet.failures.jsonl")}
    assert failed[2]["message"] == "the template's column 'when' is empty"
    assert failed[3].items() >= {"when": "2026-01-02T03:04:05Z", "price": "2.00", "raw": "", "score": None}.items()


async def test_what_a_kill_cut_off_is_dropped_and_not_generated_again(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"messages": [CHAT, [CHAT[1]]]}), source)
    async with ScriptedWorker(redis_url) as worker:
        assert (await run(redis_url, source, output)).status == 0
        assert len(worker.taken) == 2
        whole = pq.read_table(output)
        rows, stream = files.open_rows(source), tmp_path / "out.parquet.rows"
        output.unlink()
        with files.open_results(output, rows) as results:
            for each in whole.to_pylist():
                results.add(each)
            content = stream.read_bytes()
        for size in (0, 1, 5, 300, len(content) // 2, *range(len(content) - 700, len(content), 61)):
            output.unlink(missing_ok=True)
            stream.write_bytes(content[:size])
            with files.open_results(output, rows) as results:
                kept = list(results.records())
            assert kept == whole.to_pylist()[: len(kept)]
        assert len(kept) == 1
        assert (await run(redis_url, source, output)).status == 0
        assert pq.read_table(output).equals(whole)
        pq.write_table(pa.table({"messages": [[CHAT[1]], CHAT, CHAT]}), source)
        assert (await run(redis_url, source, output)).status == 0
        assert len(worker.taken) == 3


@pytest.mark.parametrize(("ending", "value"), [("jsonl", "2026-01-02T03:04:05Z"), ("csv", "2026-01-02T03:04:05Z")])
async def test_it_becomes_other_kinds_and_csv_becomes_it(
    redis_url: str, tmp_path: Path, ending: str, value: str
) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / f"out.{ending}"
    pq.write_table(table().slice(0, 1), source)
    async with ScriptedWorker(redis_url):
        assert (await run(redis_url, source, output, "--plain", "--column", "text")).status == 0
        assert value in output.read_text()
        if ending == "csv":
            back = tmp_path / "back.parquet"
            output.write_text("prompt,n\nten,10\n")
            assert (await run(redis_url, output, back, "--plain")).status == 0
            (row,) = pq.read_table(back).to_pylist()
            assert (row["prompt"], row["n"], row["reply_text"], row["reply_reasoning"]) == ("ten", "10", "ten", None)


async def test_what_cannot_be_read_or_written_is_refused(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    with pytest.raises(MapError, match="the columns of CSV and Parquet are those of the input"):
        files.check_output(output, files.open_rows(write(tmp_path / "in.jsonl", "x")))
    source.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(MapError, match=r"in\.parquet can't be read"):
        files.open_rows(source)
    pq.write_table(pa.table({"prompt": ["x"]}), source)
    async with ScriptedWorker(redis_url):
        assert (await run(redis_url, source, output, "--plain")).status == 0
        pq.write_table(pa.table({"prompt": ["x"], "more": [1]}), source)
        outcome = await run(redis_url, source, output, "--plain")
    assert outcome.status == 1
    assert "out.parquet has other columns than prompt (string), more (int64)" in outcome.err
    assert names_in(tmp_path) == ["in.jsonl", "in.parquet", "out.parquet", "out.parquet.job"]


def test_where_pyarrow_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.delitem(__import__("sys").modules, "penstock.tools.map.parquet", raising=False)
    monkeypatch.delattr("penstock.tools.map.parquet", raising=False)
    with pytest.raises(MapError, match=r"in\.parquet needs pyarrow: pip install .*\[parquet\]"):
        files.open_rows(tmp_path / "in.parquet")
