"""Computes figures from timelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.recorder import Recorder, Timeline

_LATE_SHARE = 0.01  # share of a request's gaps that may be over the target


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """Returns the distribution of these values; None if there are none."""
        values_ms = np.asarray(list(seconds), dtype=np.float64) * 1000
        if not values_ms.size:
            return None
        p50, p90, p99 = np.percentile(values_ms, (50, 90, 99))
        return cls(*(round(float(value), 3) for value in (values_ms.mean(), p50, p90, p99, np.max(values_ms))))


@dataclass(frozen=True, slots=True)
class Target:
    """Limits within which a request counts as good. None: no limit.

    Raises:
        ImpossibleLoad: a value is not above 0.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("--slo-ttft-ms", self.ttft_ms), ("--slo-itl-ms", self.itl_ms)):
            if value is not None and not value > 0:
                raise ImpossibleLoad(f"{option} must be above 0, not {value:g}")

    def is_met_by(self, timeline: Timeline) -> bool:
        """Checks that the first token, and 99 % of later deliveries, came in time."""
        if not timeline.is_complete or not timeline.stamps_s:
            return False
        if self.ttft_ms is not None and ttft_s(timeline) * 1000 > self.ttft_ms:
            return False
        late = 0 if self.itl_ms is None else sum(gap * 1000 > self.itl_ms for gap in gaps_s(timeline))
        return late <= _LATE_SHARE * len(timeline.stamps_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run.

    TTFT: from the arrival to the first delivery. ITL: between two deliveries of one request, which hold several tokens
        if a service joins them (`tokens_per_delivery`). TPOT: from the first delivery to the last, per token after the
        first. E2E: from the arrival to the end. Requests that failed count in `num_failed` alone.
    """

    num_requests: int
    num_failed: int
    seconds: float  # from the first arrival to the last end
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_delivery: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    good_requests_per_s: float | None  # None without a target
    good_share: float | None

    @classmethod
    def of(cls, recorder: Recorder, target: Target | None = None) -> Summary:
        target = None if target == Target() else target
        whole = [timeline for timeline in recorder.timelines if timeline.is_complete]
        num_requests = len(recorder.timelines)
        seconds = _duration_s(recorder.timelines)
        prompt_tokens = sum(timeline.num_prompt for timeline in whole)
        output_tokens = sum(timeline.num_output for timeline in whole)
        num_deliveries = sum(len(timeline.stamps_s) for timeline in whole)
        num_good = None if target is None else sum(map(target.is_met_by, whole))
        return cls(
            num_requests=num_requests,
            num_failed=num_requests - len(whole),
            seconds=round(seconds, 4),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            requests_per_s=_rate(len(whole), seconds),
            output_tokens_per_s=_rate(output_tokens, seconds),
            total_tokens_per_s=_rate(prompt_tokens + output_tokens, seconds),
            tokens_per_delivery=_rate(output_tokens, num_deliveries),
            ttft_ms=Spread.of(ttft_s(timeline) for timeline in whole if timeline.stamps_s),
            tpot_ms=Spread.of(tpot_s(timeline) for timeline in whole if len(timeline.stamps_s) > 1),
            itl_ms=Spread.of(gap for timeline in whole for gap in gaps_s(timeline)),
            e2e_ms=Spread.of(e2e_s(timeline) for timeline in whole),
            good_requests_per_s=None if num_good is None else _rate(num_good, seconds),
            good_share=None if num_good is None else round(num_good / max(1, num_requests), 4),
        )


def median_run(summaries: Sequence[Summary]) -> int:
    """Returns the run with the median output rate (the lower of two middle ones)."""
    ranked = sorted(range(len(summaries)), key=lambda place: summaries[place].output_tokens_per_s)
    return ranked[(len(ranked) - 1) // 2]


def ttft_s(timeline: Timeline) -> float:
    return timeline.stamps_s[0] - timeline.arrival_s


def gaps_s(timeline: Timeline) -> list[float]:
    return [after - before for before, after in zip(timeline.stamps_s, timeline.stamps_s[1:], strict=False)]


def e2e_s(timeline: Timeline) -> float:
    return (timeline.end_s or 0.0) - timeline.arrival_s


def tpot_s(timeline: Timeline) -> float:
    return (timeline.stamps_s[-1] - timeline.stamps_s[0]) / (timeline.num_output - timeline.counts[0])


def _duration_s(timelines: Sequence[Timeline]) -> float:
    ends = [timeline.end_s for timeline in timelines if timeline.end_s is not None]
    return max(ends) - min(timeline.arrival_s for timeline in timelines) if ends else 0.0


def _rate(count: float, amount: float) -> float:
    return round(count / amount, 3) if amount else 0.0
