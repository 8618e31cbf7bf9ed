"""Records each request while a benchmark runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """One request: its arrival, its deliveries of tokens, its end. Seconds of this process's own clock."""

    arrival_s: float
    stamps_s: list[float] = field(default_factory=list)  # one for each delivery
    counts: list[int] = field(default_factory=list)  # tokens of each delivery
    end_s: float | None = None
    num_prompt: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def num_output(self) -> int:
        return sum(self.counts)

    @property
    def is_complete(self) -> bool:
        return self.end_s is not None and self.error is None


class Recorder:
    """The timelines of one run, in the order of the requests."""

    def __init__(self, start_s: float | None = None) -> None:
        self.start_s = time.perf_counter() if start_s is None else start_s
        self.timelines: list[Timeline] = []

    def arrive(self, offset_s: float | None = None) -> Timeline:
        """Adds the next request, which arrives now or was due `offset_s` after the start."""
        arrival_s = time.perf_counter() if offset_s is None else self.start_s + offset_s
        timeline = Timeline(arrival_s)
        self.timelines.append(timeline)
        return timeline


def note(timeline: Timeline, num_tokens: int, now_s: float) -> None:
    if num_tokens:
        timeline.stamps_s.append(now_s)
        timeline.counts.append(num_tokens)


def end(timeline: Timeline, reason: str, num_prompt: int, now_s: float) -> None:
    timeline.end_s = now_s
    timeline.finish_reason = reason
    timeline.num_prompt = num_prompt


def fail(timeline: Timeline, error: str, now_s: float) -> None:
    timeline.end_s = now_s
    timeline.error = error
