"""Decides which requests have something to write, and when. Callers pass the time in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from penstock.worker.publish import writes
from penstock.worker.run.requests import LiveRequest


class ChunkPace(Protocol):
    """Interval at which chunks are written."""

    @property
    def interval_s(self) -> float: ...
    @property
    def is_stretched(self) -> bool:
        """Whether the interval is longer than configured, as processors are short."""


class FlushSchedule:
    """Sends the beginning of a reply at once, the rest at the interval of `pace`.

    Ends do not wait either, unless processors are short: then they go with the chunks of running requests.
    """

    def __init__(self, pace: ChunkPace) -> None:
        self.news = asyncio.Event()  # set when something is due earlier than `due_s` said
        self._pace = pace
        self._urgent: dict[LiveRequest, None] = {}
        self._waiting: dict[LiveRequest, None] = {}
        self._last_flush_s = 0.0  # the earliest among the waiting requests; if none waits, the last of all

    @property
    def is_empty(self) -> bool:
        return not (self._urgent or self._waiting)

    @property
    def next_flush_s(self) -> float:
        """When output that is not urgent is written (monotonic): an interval after a waiting reply's earliest flush."""
        return self._last_flush_s + self._pace.interval_s

    def due_s(self) -> float | None:
        """Returns when to write next (monotonic); None: nothing to write."""
        if self._urgent:
            return 0.0
        return self.next_flush_s if self._waiting else None

    def note_output(self, live: LiveRequest, others: Iterable[LiveRequest]) -> None:
        """Notes new output of `live`; `others` are the worker's requests."""
        if live.has_ended:
            self._note_end(live, others)
        if live.reply.is_urgent or not live.reply.has_begun or live not in self._waiting:
            self.add(live)

    def add(self, live: LiveRequest) -> None:
        """Schedules a request if it has something to write, and no write is under way."""
        if live.reply.num_unsettled or live.is_gone:
            return
        if live.reply.is_urgent or (not live.reply.has_begun and writes.can_begin(live)):
            self._waiting.pop(live, None)  # a request in both would be taken twice
            self._urgent[live] = None
            self.news.set()
        elif live.has_ended or live.reply.tells_prefill or (live.reply.has_begun and writes.has_any_news(live)):
            self._wait(live)

    def take(self, now_s: float) -> list[LiveRequest]:
        """Takes the requests that are due now."""
        due, self._urgent = self._urgent, {}
        if now_s >= self.next_flush_s or not self._waiting:
            due |= self._waiting
            self._waiting = {}
            self._last_flush_s = now_s
        for live in due:
            live.reply.flushed_at_s = now_s
        return [live for live in due if not live.is_gone]

    def _wait(self, live: LiveRequest) -> None:
        """Lets a request wait for the next flush. Flushes that leave it out, for ends or removals, don't delay it."""
        if not self._waiting or live.reply.flushed_at_s < self._last_flush_s:
            self._last_flush_s = live.reply.flushed_at_s
            self.news.set()
        self._waiting[live] = None

    def _note_end(self, live: LiveRequest, others: Iterable[LiveRequest]) -> None:
        if not self._pace.is_stretched:
            live.reply.is_urgent = True
        elif all(other.has_ended for other in others):  # the engine has nothing left to do
            live.reply.flushed_at_s = self._last_flush_s = 0.0
            self.news.set()
