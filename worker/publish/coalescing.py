"""Decides how long chunks are joined: as configured, or longer while publishing takes processors from the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.processors import num_processors

WINDOW_S = 0.1  # between two looks
SHORT_SHARE = 0.75  # share of all processors: a process that uses more has none to spare
OWN_SHARE = 0.01  # share of all processors that the event loop may then use
MAX_GROWTH = 2.0  # factor from one look to the next, so that no gap between chunks is much longer than the last ones


class Coalescing:
    """Stretches the flush interval when processor time is short, as with an engine that computes on the CPU.

    Each chunk costs the worker, Redis and the client about as much as a step of a small model costs per token, so fewer
    chunks mean more tokens. An engine that has its own device, or waits for requests, leaves processor time to spare:
    then nothing is held back for longer than configured. Belongs to the event loop's thread, whose processor time it
    measures.

    Args:
        shortest_s: the interval as configured; 0 is never stretched.
        longest_s: upper bound of the interval.
        pass_on: called with the interval, first on construction and then after each look.
    """

    def __init__(self, shortest_s: float, longest_s: float, pass_on: Callable[[float], None]) -> None:
        self.interval_s = shortest_s
        self._shortest_s = shortest_s
        self._longest_s = max(shortest_s, longest_s)
        self._pass_on = pass_on
        pass_on(shortest_s)
        self._num_processors = num_processors()
        self._look()

    @property
    def is_stretched(self) -> bool:
        """Whether processor time is short."""
        return self.interval_s > self._shortest_s

    def look(self) -> None:
        """Adapts the interval at most every `WINDOW_S`; meant to be called at each flush."""
        elapsed_s = time.monotonic() - self._looked_at_s
        if elapsed_s < WINDOW_S:
            return
        process_s, thread_s = self._process_s, self._thread_s
        self._look()
        available_s = elapsed_s * self._num_processors
        stretch = 0.0
        if self._process_s - process_s > SHORT_SHARE * available_s:
            stretch = min(MAX_GROWTH, (self._thread_s - thread_s) / (OWN_SHARE * available_s))
        self.interval_s = min(self._longest_s, max(self._shortest_s, self.interval_s * stretch))
        self._pass_on(self.interval_s)

    def _look(self) -> None:
        self._looked_at_s = time.monotonic()
        self._process_s = time.process_time()
        self._thread_s = time.thread_time()
