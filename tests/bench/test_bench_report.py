"""Figures as tables, JSON and a picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.report import Report, append_result
from penstock.tools.bench.summary import Summary, Target
from tests.bench.bench_timelines import recorded, timeline


def report() -> Report:
    recorder = recorded(timeline(0.0, (0.2, 1), (0.3, 1)), timeline(0.1, (0.4, 3)))
    run = Summary.of(recorder, Target(ttft_ms=250.0))
    return Report.of("a run", {"model": "x"}, [(run, recorder, 0.25)], describe_machine())


def test_tables_name_every_figure() -> None:
    text = io.StringIO()
    Console(file=text, width=160).print(report().tables())
    for part in ("a run", "output tok/s", "good req/s", "50%", "TTFT", "TPOT", "ITL", "E2E", "p99", "250.0"):
        assert part in text.getvalue()


def test_json_says_what_it_was_measured_on(tmp_path: Path) -> None:
    report().write_json(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["options"] == {"model": "x"}
    assert found["runs"][0]["ttft_ms"]["p50"] == 250.0
    assert found["runs"][0]["cpu_s"] == 0.25
    assert found["machine"]["versions"]["numpy"]
    assert found["machine"]["cores"] >= 1
    assert found["errors"] == []


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    for place in range(2):
        append_result(tmp_path / "results" / "some.jsonl", {"place": place})
    lines = (tmp_path / "results" / "some.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in lines] == [0, 1]
    assert json.loads(lines[0])["on"]["processor"]


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from penstock.tools.bench.plot import write_plot  # imports matplotlib

    write_plot(report(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")
