"""Draws a benchmark's median run, or the median runs of two results side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from penstock.tools.bench.comparing.comparison import Comparison, ComparisonRow
from penstock.tools.bench.comparing.table import change_text, interval_text, p_text
from penstock.tools.bench.recorder import Recorder, Timeline
from penstock.tools.bench.report import Report
from penstock.tools.bench.summary import e2e_s, gaps_s, ttft_s

_NUM_BINS = 60
_MARKS = ((50, "o"), (90, "^"), (99, "s"))
"""Percentiles that are marked on a curve, as `numpy.percentile` computes them."""

_COLOURS = ("tab:blue", "tab:orange")


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """One run: its name in legends, and its recorder."""

    name: str
    recorder: Recorder

    @property
    def whole(self) -> list[Timeline]:
        return [timeline for timeline in self.recorder.timelines if timeline.is_complete]


@dataclass(frozen=True, slots=True)
class _Latency:
    name: str
    title: str
    label: str  # of the x axis, with its unit
    of_what: str  # what the y axis counts
    seconds: Callable[[Timeline], Sequence[float]]


_LATENCIES = (
    _Latency("TTFT", "time to first token (TTFT)", "arrival to first token (ms)", "requests",
             lambda line: [ttft_s(line)] if line.stamps_s else []),
    _Latency("ITL", "between deliveries (ITL)", "between two deliveries of a request (ms)", "gaps", gaps_s),
    _Latency("E2E", "end to end (E2E)", "arrival to end (ms)", "requests", lambda line: [e2e_s(line)]),
)  # fmt: skip


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG: tokens per second over time, and how TTFT, ITL and end-to-end time are distributed."""
    name = f"run {report.median + 1} of {len(report.runs)}" if len(report.runs) > 1 else "the run"
    _write(figure_of([PlottedRun(name, report.recorders[report.median])], report.title), path)


def write_comparison(found: Comparison, path: Path) -> None:
    """Writes the same figure for the median runs of both, overlaid, with the changes in the legends."""
    _write(comparison_figure(found), path)


def comparison_figure(found: Comparison) -> Figure:
    """Makes `write_comparison`'s figure."""
    results = (found.first, found.second)
    drawn = [
        PlottedRun(f"{place}: {result.path.name}", result.recorders[result.median])
        for place, result in zip(("first", "second"), results, strict=True)
    ]
    changes = {latency.name: _changes(found.rows, latency.name) for latency in _LATENCIES}
    figure = figure_of(drawn, f"{found.second.path.name} against {found.first.path.name}", changes)
    figure.supxlabel(found.method, fontsize=7, wrap=True)
    return figure


def figure_of(runs: Sequence[PlottedRun], title: str, notes: dict[str, str] | None = None) -> Figure:
    """Draws four panels with all of `runs` in each; `notes` are the titles of legends, by latency."""
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    over_time, *panels = figure.subplots(2, 2).flat
    _rate_over_time(over_time, runs)
    for axes, latency in zip(panels, _LATENCIES, strict=True):
        _distribution(axes, latency, runs)
        axes.legend(fontsize=7, loc="lower right", title=(notes or {}).get(latency.name), title_fontsize=7)
    return figure


def _write(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(str(path))


def _rate_over_time(axes: Any, runs: Sequence[PlottedRun]) -> None:
    axes.set_title("output tokens per second")
    axes.set_xlabel("time since the start (s)")
    axes.set_ylabel("output tokens per second (tok/s)")
    for run, colour in zip(runs, _COLOURS, strict=False):
        stamps = np.array([stamp - run.recorder.start_s for line in run.whole for stamp in line.stamps_s])
        counts = np.array([count for line in run.whole for count in line.counts])
        if stamps.size:
            tokens, edges = np.histogram(stamps, bins=_NUM_BINS, weights=counts)
            label = f"{run.name}, in {_NUM_BINS} parts of {1000 * (edges[1] - edges[0]):.3g} ms"
            axes.stairs(tokens / np.diff(edges), edges, fill=len(runs) == 1, alpha=0.7, color=colour, label=label)
        else:
            axes.plot([], [], color=colour, label=f"{run.name}, no tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper right")


def _distribution(axes: Any, latency: _Latency, runs: Sequence[PlottedRun]) -> None:
    axes.set_title(latency.title)
    axes.set_xlabel(latency.label)
    axes.set_ylabel(f"share of {latency.of_what} within that time")
    for run, colour in zip(runs, _COLOURS, strict=False):
        values_ms = np.sort(np.array([1000 * value for line in run.whole for value in latency.seconds(line)]))
        axes.plot(
            values_ms, np.arange(1, len(values_ms) + 1) / max(1, len(values_ms)), color=colour,
            label=f"{run.name}, {len(values_ms):,} {latency.of_what}",
        )  # fmt: skip
        for percent, marker in _MARKS if len(values_ms) else ():
            value_ms = float(np.percentile(values_ms, percent))
            label = f"p{percent} {value_ms:,.1f} ms"
            axes.plot([value_ms], [percent / 100], marker, color=colour, markersize=5, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _changes(rows: Sequence[ComparisonRow], latency: str) -> str:
    """Describes how p50 and p99 differ, one a line."""
    wanted = [row for row in rows if row.figure.latency == latency and row.figure.statistic in ("p50", "p99")]
    return "\n".join(_change(row) for row in wanted)


def _change(row: ComparisonRow) -> str:
    text = f"{row.figure.statistic} {change_text(row)}"
    if row.interval is None:
        return text
    p = "" if row.interval.p is None else f"\np {p_text(row)} by {row.interval.test}"
    return f"{text}, 95 % interval {interval_text(row)}{p}"
