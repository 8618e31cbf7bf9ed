"""Renders runs as tables for people and as one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.result_file import result_text
from penstock.tools.bench.summary import Summary, median_run
from penstock.tools.bench.traffic.load import Load

_LATENCIES = (
    ("TTFT", "ttft_ms", "arrival to first token"),
    ("TPOT", "tpot_ms", "per token after the first"),
    ("ITL", "itl_ms", "between two deliveries"),
    ("E2E", "e2e_ms", "arrival to end"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """The runs of one load, and what they ran on."""

    title: str
    options: dict[str, Any]
    machine: dict[str, Any]
    runs: tuple[Summary, ...]
    recorders: tuple[Recorder, ...]
    cpu_s: tuple[float, ...]  # processor seconds of this process in each run
    load: Load | None = None  # load of the first run; None: not known

    @classmethod
    def of(
        cls,
        title: str,
        options: dict[str, Any],
        runs: Sequence[tuple[Summary, Recorder, float]],
        machine: dict[str, Any],
        load: Load | None = None,
    ) -> Report:
        """Builds a report from `(figures, recorder, processor seconds)` of each run; `machine`: `describe_machine`
        before them.
        """
        summaries, recorders, cpu_s = zip(*runs, strict=True)
        return cls(title, options, machine, summaries, recorders, cpu_s, load)

    @property
    def median(self) -> int:
        """Index of the run whose latencies are shown."""
        return median_run(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the single deliveries."""
        load = self.load
        return {
            "title": self.title,
            "options": self.options,
            "load": None if load is None else {"requests": len(load.requests), "digest": load.digest()},
            "machine": self.machine,
            "runs": [{**asdict(run), "cpu_s": cpu_s} for run, cpu_s in zip(self.runs, self.cpu_s, strict=True)],
            "errors": sorted({line.error for recorder in self.recorders for line in recorder.timelines if line.error}),
        }

    def write_json(self, path: Path) -> None:
        """Writes `to_json` and all deliveries, for `read_result`."""
        path.write_text(result_text(self.to_json(), self.recorders))

    def tables(self) -> Group:
        return Group(self._rates(), self._latencies())

    def _rates(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        names = ["run", "requests", "failed", "seconds", "output tok/s", "total tok/s", "req/s", "tok/delivery"]
        has_target = self.runs[0].good_share is not None
        for name in [*names, *(["good req/s", "good"] if has_target else [])]:
            table.add_column(name, justify="right")
        for place, run in enumerate(self.runs):
            cells = [
                f"{place + 1}", f"{run.num_requests}", f"{run.num_failed}", f"{run.seconds:.2f}",
                f"{run.output_tokens_per_s:,.1f}", f"{run.total_tokens_per_s:,.1f}", f"{run.requests_per_s:.2f}",
                f"{run.tokens_per_delivery:.2f}",
            ]  # fmt: skip
            if run.good_requests_per_s is not None and run.good_share is not None:
                cells += [f"{run.good_requests_per_s:.2f}", f"{run.good_share:.0%}"]
            table.add_row(*cells)
        return table

    def _latencies(self) -> Table:
        run = self.runs[self.median]
        table = Table(title=f"milliseconds, run {self.median + 1}", title_justify="left")
        for name in ("", "mean", "p50", "p90", "p99", "max"):
            table.add_column(name, justify="right" if name else "left")
        for name, field, meaning in _LATENCIES:
            spread = getattr(run, field)
            cells = ["-"] * 5 if spread is None else [f"{value:,.1f}" for value in asdict(spread).values()]
            table.add_row(f"{name} [dim]{meaning}[/]", *cells)
        return table


def append_result(path: Path, record: dict[str, Any]) -> None:
    """Appends a measurement to a JSONL file, together with the machine it was taken on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"on": describe_machine(), **record}) + "\n")
