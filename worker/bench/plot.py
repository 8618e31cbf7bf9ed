"""A benchmark's median run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from penstock.worker.bench.recorder import Timeline
from penstock.worker.bench.report import Report
from penstock.worker.bench.summary import gaps_s, ttft_s

_NUM_BINS = 60


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG: tokens per second over time, and how TTFT, ITL and end-to-end time are distributed."""
    recorder = report.recorders[report.median]
    whole = [timeline for timeline in recorder.timelines if timeline.is_complete]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(report.title, fontsize=11)
    over_time, ttft, itl, e2e = figure.subplots(2, 2).flat
    _rate_over_time(over_time, whole, recorder.start_s)
    _distribution(ttft, "time to first token", [ttft_s(line) for line in whole if line.stamps_s])
    _distribution(itl, "between two deliveries", [gap for line in whole for gap in gaps_s(line)])
    _distribution(e2e, "arrival to end", [(line.end_s or 0.0) - line.arrival_s for line in whole])
    FigureCanvasAgg(figure).print_png(str(path))  # type: ignore[no-untyped-call]


def _rate_over_time(axes: Any, timelines: Sequence[Timeline], start_s: float) -> None:
    axes.set_title("output tokens per second")
    axes.set_xlabel("seconds")
    stamps = np.array([stamp - start_s for line in timelines for stamp in line.stamps_s])
    counts = np.array([count for line in timelines for count in line.counts])
    if stamps.size:
        tokens, edges = np.histogram(stamps, bins=_NUM_BINS, weights=counts)
        axes.stairs(tokens / np.diff(edges), edges, fill=True, alpha=0.6)
    axes.grid(alpha=0.3)


def _distribution(axes: Any, title: str, seconds: Sequence[float]) -> None:
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share below")
    if seconds:
        values_ms = np.sort(np.asarray(seconds)) * 1000
        axes.plot(values_ms, np.arange(1, len(values_ms) + 1) / len(values_ms))
        for share in (50, 99):
            axes.axvline(np.percentile(values_ms, share), linestyle=":", linewidth=1, color="grey")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
