"""Timelines of requests as a benchmark would note them."""

from __future__ import annotations

from penstock.worker.bench.recorder import Recorder, Timeline, end, note


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
