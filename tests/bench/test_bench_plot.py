"""Axes, units and legends of a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.tools.bench.comparing.comparison import compare
from penstock.tools.bench.comparing.table import change_text, p_text
from penstock.tools.bench.summary import gaps_s
from tests.bench.bench_timelines import drawn, result

pytest.importorskip("matplotlib")

from penstock.tools.bench.plot import PlottedRun, comparison_figure, figure_of, write_comparison

PANELS = {
    "output tokens per second": ("time since the start (s)", "output tokens per second (tok/s)"),
    "time to first token (TTFT)": ("arrival to first token (ms)", "share of requests within that time"),
    "between deliveries (ITL)": ("between two deliveries of a request (ms)", "share of gaps within that time"),
    "end to end (E2E)": ("arrival to end (ms)", "share of requests within that time"),
}


def legends(figure: Any) -> dict[str, list[str]]:
    return {axes.get_title(): [text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes}


def test_axes_have_names_and_units() -> None:
    figure = figure_of([PlottedRun("the run", drawn(0))], "a run")
    assert {axes.get_title(): (axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes} == PANELS
    assert figure.get_suptitle() == "a run"


def test_legends_name_the_run_and_its_percentiles() -> None:
    recorder = drawn(0)
    found = legends(figure_of([PlottedRun("the run", recorder)], "a run"))
    gaps_ms = [1000 * gap for line in recorder.timelines for gap in gaps_s(line)]
    assert found["between deliveries (ITL)"] == [
        "the run, 704 gaps",
        *(f"p{percent} {np.percentile(gaps_ms, percent):,.1f} ms" for percent in (50, 90, 99)),
    ]
    assert found["output tokens per second"][0].startswith("the run, in 60 parts of ")


def test_percentiles_are_marked_where_they_are() -> None:
    recorder = drawn(0)
    (itl,) = [axes for axes in figure_of([PlottedRun("x", recorder)], "").axes if "ITL" in axes.get_title()]
    marks = {line.get_label(): np.asarray(line.get_xydata())[0].tolist() for line in itl.lines[1:]}
    gaps_ms = [1000 * gap for line in recorder.timelines for gap in gaps_s(line)]
    assert list(marks.values()) == [
        [pytest.approx(np.percentile(gaps_ms, percent)), percent / 100] for percent in (50, 90, 99)
    ]


def test_a_comparison_lays_one_over_the_other_and_says_how_sure_it_is(tmp_path: Path) -> None:
    first = result(tmp_path / "before.json", drawn(0), drawn(1), drawn(2))
    second = result(tmp_path / "after.json", drawn(3, slower=1.2), drawn(4, slower=1.2), drawn(5, slower=1.2))
    found = compare((first, second))
    figure = comparison_figure(found)
    for title, texts in legends(figure).items():
        assert [text for text in texts if text.startswith("first: before.json")], title
        assert [text for text in texts if text.startswith("second: after.json")], title
    (itl,) = [axes for axes in figure.axes if "ITL" in axes.get_title()]
    legend = itl.get_legend()
    assert legend is not None
    note = legend.get_title().get_text()
    for name in ("p50", "p99"):
        (row,) = [row for row in found.rows if row.figure.name == f"ITL {name}"]
        assert f"{name} {change_text(row)}, 95 % interval" in note
        assert f"p {p_text(row)} by Welch's t-test" in note
    assert figure.get_supxlabel() == found.method
    write_comparison(found, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_without_answers_is_an_empty_plot() -> None:
    figure = figure_of([PlottedRun("the run", drawn(0, num_failed=64))], "nothing came")
    assert legends(figure)["time to first token (TTFT)"] == ["the run, 0 requests"]
