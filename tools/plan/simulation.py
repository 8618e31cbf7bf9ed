"""A fleet on a virtual clock: a trace's requests enter one queue, and replicas take what they have capacity for.

The simulation covers the scheduler, the pages with their prefix cache, and the order of steps. A replica gets a request
as soon as it has capacity: Redis, tokenizers and sending tokens to clients take no time. Replicas that wait for
requests are served in turn, as Redis serves blocking readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from penstock.engine.progress import ReportProgress
from penstock.tools.plan.replica import Replica, Served
from penstock.tools.plan.traces import Trace

_REPORT_EVERY = 1000  # events


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of seconds; 0 if there are no values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: np.ndarray) -> Percentiles:
        return cls(*map(float, np.percentile(seconds, (50, 90, 99)))) if seconds.size else cls(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a fleet, or of one of its replicas. Rates are over the time from the first arrival to the last token
    of all.

    TTFT: from the arrival to the first token, the wait in the queue included. ITL: between two tokens of one request;
    those of one dispatch come at once.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache saved
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Percentiles
    itl_s: Percentiles
    utilisation: float  # share of the time that devices computed
    steps: int
    sequences_per_step: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Simulated:
    seconds: float  # from the first arrival to the last token
    longest_queue: int  # most requests that waited for a replica at once
    total: Figures
    replicas: tuple[Figures, ...]


def simulate(trace: Trace, replicas: Sequence[Replica], progress: ReportProgress | None = None) -> Simulated:
    """Runs all requests to their ends. The same trace and replicas give the same figures.

    Args:
        trace: requests that fit the replicas (`Trace.check`).
        replicas: new ones.
        progress: called with how many requests have come.
    """
    fleet = _Fleet(trace, replicas)
    fleet.run(progress)
    last_s = max(served.stamps_s[-1] for replica in replicas for served in replica.served)
    seconds = last_s - trace.requests[0].arrival_s
    return Simulated(
        seconds,
        fleet.longest_queue,
        _figures(replicas, seconds),
        tuple(_figures([replica], seconds) for replica in replicas),
    )


class _Fleet:
    """Events in time order; at the same moment, arrivals come first, and commits before plans."""

    def __init__(self, trace: Trace, replicas: Sequence[Replica]) -> None:
        self.longest_queue = 0
        self._now_s = 0.0
        self._coming = deque(Served(request, number) for number, request in enumerate(trace.requests))
        self._queue: deque[Served] = deque()
        self._replicas = replicas
        self._turns = deque(range(len(replicas)))  # order in which replicas with capacity take requests
        self._idle = set(self._turns)
        self._events: list[tuple[float, bool, int]] = []  # time, whether a turn begins, replica

    def run(self, progress: ReportProgress | None) -> None:
        count, total = 0, len(self._coming)
        while self._coming or self._events:
            if not self._events or (self._coming and self._coming[0].request.arrival_s <= self._events[0][0]):
                served = self._coming.popleft()
                self._now_s = served.request.arrival_s
                self._queue.append(served)
                self._share_out()
                self.longest_queue = max(self.longest_queue, len(self._queue))
            else:
                self._now_s, begins, place = heappop(self._events)
                (self._begin if begins else self._commit)(place)
            count += 1
            if progress is not None and not count % _REPORT_EVERY:
                progress(total - len(self._coming), total, f"{len(self._queue)} queued")

    def _share_out(self) -> None:
        while self._queue:
            place = next((place for place in self._turns if self._replicas[place].has_room), None)
            if place is None:
                return
            self._turns.remove(place)
            self._turns.append(place)
            self._replicas[place].take(self._queue.popleft())
            if place in self._idle:
                self._idle.remove(place)
                heappush(self._events, (self._now_s, True, place))

    def _begin(self, place: int) -> None:
        heappush(self._events, (self._replicas[place].begin(self._now_s), False, place))

    def _commit(self, place: int) -> None:
        next_s = self._replicas[place].commit()
        self._share_out()
        if self._replicas[place].has_work:
            heappush(self._events, (next_s, True, place))
        else:
            self._idle.add(place)


def _figures(replicas: Sequence[Replica], seconds: float) -> Figures:
    served = [each for replica in replicas for each in replica.served]
    output_tokens = sum(each.request.num_output for each in served)
    num_steps = sum(replica.num_steps for replica in replicas)
    return Figures(
        requests=len(served),
        prompt_tokens=sum(each.request.num_prompt for each in served),
        cached_tokens=sum(each.num_cached for each in served),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        ttft_s=Percentiles.of(np.array([each.ttft_s for each in served])),
        itl_s=Percentiles.of(np.concatenate([np.empty(0), *(np.diff(each.stamps_s) for each in served)])),
        utilisation=sum(replica.busy_s for replica in replicas) / seconds / len(replicas),
        steps=num_steps,
        sequences_per_step=sum(replica.num_rows for replica in replicas) / max(1, num_steps),
        preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
    )
