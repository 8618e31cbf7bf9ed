"""Recorded requests become the figures of a run."""

from __future__ import annotations

import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.recorder import Timeline, fail
from penstock.tools.bench.summary import Spread, Summary, Target, median_run
from tests.bench.bench_timelines import recorded, timeline


def test_figures_of_a_run() -> None:
    failed = Timeline(0.0)
    fail(failed, "no room", 0.5)
    steady = timeline(1.0, (1.2, 1), (1.3, 1), (1.5, 2))
    single = timeline(2.0, (2.5, 4))
    run = Summary.of(recorded(failed, steady, single))
    assert (run.num_requests, run.num_failed) == (3, 1)
    assert (run.prompt_tokens, run.output_tokens) == (20, 8)
    assert run.seconds == pytest.approx(2.5)  # from the failed one's arrival
    assert run.output_tokens_per_s == pytest.approx(3.2)
    assert run.total_tokens_per_s == pytest.approx(11.2)
    assert run.tokens_per_delivery == 2.0
    assert run.ttft_ms == Spread(mean=350.0, p50=350.0, p90=470.0, p99=497.0, max=500.0)
    assert run.itl_ms is not None
    assert (run.itl_ms.p50, run.itl_ms.max) == (150.0, 200.0)
    assert run.tpot_ms is not None
    assert run.tpot_ms.mean == 100.0  # 0.3 s for three tokens; the single delivery has none
    assert run.e2e_ms is not None
    assert run.e2e_ms.max == 500.0
    assert run.good_share is None


def test_nothing_that_succeeded_has_no_latencies() -> None:
    failed = Timeline(0.0)
    fail(failed, "no room", 0.5)
    run = Summary.of(recorded(failed), Target(ttft_ms=100.0))
    assert (run.ttft_ms, run.itl_ms, run.tpot_ms, run.e2e_ms) == (None, None, None, None)
    assert (run.good_share, run.good_requests_per_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("target", "is_good"),
    [
        (Target(ttft_ms=201.0), True),
        (Target(ttft_ms=199.0), False),
        (Target(itl_ms=101.0), True),
        (Target(itl_ms=99.0), False),
        (Target(ttft_ms=201.0, itl_ms=99.0), False),
    ],
)
def test_a_good_request_keeps_to_both_targets(target: Target, is_good: bool) -> None:
    line = timeline(1.0, (1.2, 1), (1.3, 1), (1.4, 1))
    assert target.is_met_by(line) is is_good
    assert Summary.of(recorded(line), target).good_share == float(is_good)


def test_one_late_delivery_in_a_hundred_is_forgiven() -> None:
    late = [(place * 0.01 + (1.0 if place > 50 else 0.0), 1) for place in range(120)]
    assert Target(itl_ms=20.0).is_met_by(timeline(0.0, *late))
    assert not Target(itl_ms=20.0).is_met_by(timeline(0.0, *late[40:60]))


def test_the_median_run_is_one_of_them() -> None:
    slow, middle, fast = (Summary.of(recorded(timeline(0.0, (seconds, 8)))) for seconds in (4.0, 2.0, 1.0))
    assert median_run([fast, slow, middle]) == 2
    assert median_run([fast, slow]) == 1


def test_a_target_must_be_above_nothing() -> None:
    with pytest.raises(ImpossibleLoad, match="--slo-itl-ms must be above 0, not 0"):
        Target(itl_ms=0.0)
