"""Timelines of requests as a benchmark would record them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.recorder import Recorder, Timeline, end, fail, note
from penstock.tools.bench.report import Report
from penstock.tools.bench.result_file import Result, read_result
from penstock.tools.bench.summary import Summary, Target
from penstock.tools.bench.traffic.load import Load


def timeline(arrival_s: float, *stamps: tuple[float, int], num_prompt: int = 10) -> Timeline:
    found = Timeline(arrival_s)
    for stamp_s, count in stamps:
        note(found, count, stamp_s)
    end(found, "length", num_prompt, stamps[-1][0])
    return found


def recorded(*timelines: Timeline) -> Recorder:
    recorder = Recorder()
    recorder.timelines = list(timelines)
    return recorder


def drawn(seed: int, *, slower: float = 1.0, count: int = 64, num_failed: int = 0) -> Recorder:
    """Draws a run as a service might have it. Requests take `slower` times as long; the last `num_failed` fail."""
    rng = np.random.default_rng(seed)
    of_place = 1 + np.arange(count) % 5
    recorder = Recorder(start_s=0.0)
    for place in range(count):
        found = recorder.arrive(0.05 * place)
        now_s = found.arrival_s + slower * float(rng.gamma(40, 0.001) * of_place[place])
        for _ in range(12):
            note(found, 2, now_s)
            now_s += slower * float(rng.gamma(5, 0.002))
        if place >= count - num_failed:
            fail(found, "gone", now_s)
        else:
            end(found, "length", 10, found.stamps_s[-1])
    return recorder


def result(
    path: Path,
    *recorders: Recorder,
    title: str = "service, tiny",
    load: Load | None = None,
    machine: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Writes these runs to a file and reads its result back."""
    target = Target(options.get("slo_ttft_ms"))
    runs = [(Summary.of(recorder, target), recorder, 0.5) for recorder in recorders]
    of_load = load or LoadOptions(requests=len(recorders[0].timelines)).load(1000)
    on = {"processor": "P", "cores": 2, "gpus": [], "versions": {"jax": "1"}, **(machine or {})}
    Report.of(title, {"model": "tiny", **options}, runs, on, of_load).write_json(path)
    return read_result(path)
