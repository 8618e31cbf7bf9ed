"""Two results are compared: what may be, and how sure a difference is."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.tools.bench.comparing import intervals
from penstock.tools.bench.comparing.comparison import Comparison, ComparisonRow, compare
from penstock.tools.bench.comparing.figures import STATISTICS, Sample
from penstock.tools.bench.comparing.intervals import (
    CONFIDENCE,
    PAIRED,
    WELCH,
    Interval,
    by_pairs,
    by_requests,
    by_runs,
)
from penstock.tools.bench.comparing.table import as_table
from penstock.tools.bench.errors import NotComparable
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.result_file import Result
from tests.bench.bench_timelines import drawn, result


def rows(found: Comparison) -> dict[str, ComparisonRow]:
    return {row.figure.name: row for row in found.rows}


# --- what may be compared ---


@pytest.mark.parametrize(
    ("changes", "field", "one", "other"),
    [
        ({"model": "large"}, "options.model", "tiny", "large"),
        ({"weights": "abc"}, "options.weights", None, "abc"),
        ({"dtype": "bfloat16"}, "options.dtype", None, "bfloat16"),
        ({"title": "engine, tiny"}, "title", "service", "engine"),
        ({"clients": 4}, "options.clients", None, 4),
        ({"machine": {"processor": "Q"}}, "machine.processor", "P", "Q"),
        ({"machine": {"gpus": ["H100"]}}, "machine.gpus", [], ["H100"]),
        ({"machine": {"cores": 8}}, "machine.cores", 2, 8),
    ],
)
def test_what_is_of_something_else_is_refused_by_its_field(
    tmp_path: Path, changes: dict[str, Any], field: str, one: Any, other: Any
) -> None:
    first, second = result(tmp_path / "a", drawn(0)), result(tmp_path / "b", drawn(1), **changes)
    with pytest.raises(NotComparable) as refused:
        compare((first, second))
    assert refused.value.fields == ((field, one, other),)
    assert f"{field} is {one!r} in the first and {other!r} in the second" in str(refused.value)
    found = compare((first, second), anyway=True)
    assert found.obstacles == refused.value.fields
    assert found.is_paired


def test_another_load_is_named_by_the_option_or_as_a_whole(tmp_path: Path) -> None:
    first = result(tmp_path / "a", drawn(0), seed=0)
    load = LoadOptions(requests=64, seed=1).load(1000)
    with pytest.raises(NotComparable, match=r"options.seed is 0 in the first and 1 in the second"):
        compare((first, result(tmp_path / "b", drawn(1), load=load, seed=1)))
    with pytest.raises(NotComparable) as refused:  # a file of requests that was changed
        compare((first, result(tmp_path / "b", drawn(1), load=load, seed=0)))
    assert refused.value.fields == (("load", first.load, {"requests": 64, "digest": load.digest()}),)
    assert not compare((first, result(tmp_path / "b", drawn(1), load=load)), anyway=True).is_paired


def test_what_a_comparison_is_made_for_is_told_and_no_obstacle(tmp_path: Path) -> None:
    first = result(tmp_path / "a", drawn(0), max_num_seqs=8)
    second = result(tmp_path / "b", drawn(1), max_num_seqs=16, machine={"versions": {"jax": "2"}})
    found = compare((first, second))
    assert found.obstacles == ()
    assert found.others == (("options.max_num_seqs", 8, 16), ("versions.jax", "1", "2"))
    stricter = result(tmp_path / "c", drawn(1), slo_ttft_ms=50.0, max_num_seqs=8)
    found = compare((first, stricter))  # what counts as good is not the same, so it is not a figure of both
    assert found.others == (("options.slo_ttft_ms", None, 50.0),)
    assert "good" not in rows(found)


# --- one run each: requests are the unit ---


def test_of_one_run_each_requests_are_drawn(tmp_path: Path) -> None:
    found = compare((result(tmp_path / "a", drawn(0)), result(tmp_path / "b", drawn(1, slower=1.3))))
    assert (found.unit, found.is_paired) == ("requests", True)
    by_name = rows(found)
    for name in ("TTFT mean", "TPOT mean", "ITL mean", "ITL p50", "ITL p90"):
        row = by_name[name]
        assert row.change is not None
        assert row.interval is not None
        assert row.interval.low < 0.3 < row.interval.high, name
        assert row.interval.low < row.change < row.interval.high
        assert (row.verdict, row.interval.p) == ("worse", None)
    assert by_name["TTFT p99"].interval is None  # none of 64 values is known to be beyond it
    assert by_name["output rate"].interval is None
    assert (by_name["failed"].first, by_name["failed"].change, by_name["failed"].verdict) == (0.0, 0.0, "")
    assert "does not know how runs differ" in found.method
    assert compare((found.first, found.second)) == found  # the seed is always the same


def test_pairs_are_surer_than_strangers(tmp_path: Path) -> None:
    """Requests differ by a factor of five: what both sides share cancels out."""
    first, second = result(tmp_path / "a", drawn(0)), result(tmp_path / "b", drawn(1, slower=1.1))
    other_load = result(tmp_path / "c", drawn(1, slower=1.1), load=LoadOptions(requests=64, seed=1).load(1000), seed=1)
    paired, strangers = compare((first, second)), compare((first, other_load), anyway=True)
    widths = []
    for found in (paired, strangers):
        interval = rows(found)["TTFT mean"].interval
        assert interval is not None
        widths.append(interval.high - interval.low)
    assert widths[0] < 0.5 * widths[1]
    assert (rows(paired)["TTFT mean"].verdict, rows(strangers)["TTFT mean"].verdict) == ("worse", "")


def test_failures_are_compared_too(tmp_path: Path) -> None:
    found = compare((result(tmp_path / "a", drawn(0)), result(tmp_path / "b", drawn(0, num_failed=16))))
    row = rows(found)["failed"]
    assert (row.first, row.second, row.change) == (0.0, 0.25, 0.25)
    assert row.interval is not None
    assert 0.1 < row.interval.low < 0.25 < row.interval.high < 0.4
    assert row.verdict == "worse"


def at_once(seed: int) -> Recorder:
    """Draws a run in which deliveries come three at a time."""
    recorder = drawn(seed)
    for line in recorder.timelines:
        line.stamps_s[1:] = [stamp_s for stamp_s in line.stamps_s[1::3] for _ in range(3)][: len(line.stamps_s) - 1]
        line.end_s = line.stamps_s[-1]
    return recorder


def test_what_takes_no_time_at_all_has_no_ratio(tmp_path: Path) -> None:
    single = [result(tmp_path / f"r{seed}", at_once(seed)) for seed in range(4)]
    repeated = [result(tmp_path / f"s{seed}", at_once(seed), at_once(seed + 1)) for seed in (0, 2)]
    for found in (
        compare((single[0], single[1])),
        compare((single[0], single[1]), (single[2], single[3])),
        compare((repeated[0], repeated[1])),
    ):
        row = rows(found)["ITL p50"]
        assert (row.first, row.second, row.change, row.interval, row.verdict) == (0.0, 0.0, None, None, "")
        assert rows(found)["ITL p90"].change is not None
        text = io.StringIO()
        Console(file=text, width=200).print(as_table(found))
        assert "ITL p50, ms" in text.getvalue()
        json.dumps(found.to_json(), allow_nan=False)


def test_too_few_requests_say_nothing(tmp_path: Path) -> None:
    pair = result(tmp_path / "a", drawn(0, count=6)), result(tmp_path / "b", drawn(1, count=6, slower=9.0))
    found = compare(pair)
    assert {row.interval for row in found.rows if row.figure.kind == "latency"} == {None}
    assert found.worse_by(0.0) == []


def test_nothing_that_succeeded_is_no_figure(tmp_path: Path) -> None:
    found = compare((result(tmp_path / "a", drawn(0)), result(tmp_path / "b", drawn(0, num_failed=64))))
    row = rows(found)["TTFT p50"]
    assert (row.second, row.change, row.interval) == (None, None, None)
    assert rows(found)["failed"].verdict == "worse"


# --- several runs each: runs are the unit ---


def test_of_several_runs_each_runs_are_the_unit(tmp_path: Path) -> None:
    first = result(tmp_path / "a", *(drawn(seed) for seed in range(4)), slo_ttft_ms=100.0)
    second = result(tmp_path / "b", *(drawn(9 + seed, slower=0.8) for seed in range(3)), slo_ttft_ms=100.0)
    found = compare((first, second))
    assert (found.unit, found.method) == ("runs", f"95 % intervals and p: {WELCH} on 4 and 3 runs")
    row = rows(found)["TPOT mean"]
    assert row.interval is not None
    assert row.interval.p is not None
    assert row.interval.low < -0.2 < row.interval.high < -0.1
    assert row.interval.p < 0.01
    assert row.verdict == "better"
    good = rows(found)["good"]
    assert good.first is not None
    assert good.second is not None
    assert good.change == good.second - good.first > 0
    assert (good.verdict, rows(found)["good rate"].verdict) == ("better", "better")
    output = rows(found)["output rate"].interval
    assert output is not None
    assert output.p is not None


def test_welch_is_what_the_formula_says() -> None:
    """With equal variances and numbers it is Student's t, here with 4 degrees of freedom: 2.776 in any table."""
    found = by_runs([10.0, 12.0, 11.0], [15.0, 17.0, 16.0])
    half = 2.776 * math.sqrt(1 / 3 + 1 / 3)
    assert (found.low, found.high) == pytest.approx((5 - half, 5 + half), abs=0.001)
    assert found.p is not None
    assert 0.001 < found.p < 0.005  # t is 6.12, and 5.60 is 0.005, 8.61 0.001
    of_one_that_spreads = by_runs([10.0, 12.0, 11.0], [12.0, 20.0, 16.0])
    assert of_one_that_spreads.low < 0 < of_one_that_spreads.high


def test_runs_that_do_not_differ_have_no_p() -> None:
    found = by_runs([0.0, 0.0], [0.0, 0.0])
    assert (found.low, found.high, found.p) == (0.0, 0.0, None)


# --- several pairs, measured in turn ---


def in_turn(folder: Path, *, slower: float, num_pairs: int = 4) -> list[tuple[Result, Result]]:
    """Draws pairs on a machine that becomes twice as slow from one pair to the next."""
    return [
        (
            result(folder / f"a{turn}", drawn(2 * turn, slower=2.0**turn), max_num_seqs=8),
            result(folder / f"b{turn}", drawn(2 * turn + 1, slower=slower * 2.0**turn), max_num_seqs=16),
        )
        for turn in range(num_pairs)
    ]


def test_pairs_measured_in_turn_do_not_mind_a_machine_that_changes(tmp_path: Path) -> None:
    pairs = in_turn(tmp_path, slower=1.2)
    found = compare(*pairs)
    assert (found.unit, found.test) == ("pairs", PAIRED)
    assert found.method == "95 % intervals and p: paired t-test on 4 pairs of files, each as measured in turn"
    row = rows(found)["ITL mean"]
    assert row.interval is not None
    assert row.interval.p is not None
    assert row.interval.low < 0.2 < row.interval.high < 0.35
    assert (row.verdict, row.interval.test) == ("worse", PAIRED)
    assert row.interval.p < 0.01
    singles = [rows(compare(pair))["ITL mean"] for pair in pairs]
    as_if_strangers = by_runs(
        *(np.log([getattr(row, side) for row in singles]).tolist() for side in ("first", "second"))
    )
    assert as_if_strangers.low < 0 < as_if_strangers.high
    text = io.StringIO()
    Console(file=text, width=200).print(as_table(found))
    assert "b0 against" in text.getvalue()
    assert "a0, and 3 more such pairs" in text.getvalue()
    assert len(found.to_json()["pairs"]) == 4


def test_pairs_in_the_wrong_order_are_noticed(tmp_path: Path) -> None:
    (one, two), (three, four) = in_turn(tmp_path, slower=1.0, num_pairs=2)
    with pytest.raises(NotComparable, match=r"options\.max_num_seqs is 8 in the first and 16 in the second"):
        compare((one, three), (two, four))
    other = result(tmp_path / "c", drawn(7), model="large", max_num_seqs=16)
    with pytest.raises(NotComparable, match=r"options\.model is 'tiny' in the first and 'large' in the second"):
        compare((one, two), (three, other))


def test_the_paired_test_is_what_the_formula_says() -> None:
    """Differences are 1, 2 and 3: 2 +- 4.303 / sqrt(3), with 2 degrees of freedom."""
    found = by_pairs([10.0, 200.0, 3000.0], [11.0, 202.0, 3003.0])
    assert (found.low, found.high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-3)
    assert found.p == pytest.approx(0.0742, abs=1e-3)
    assert by_pairs([1.0, 2.0], [2.0, 3.0]) == Interval(1.0, 1.0)


# --- the methods keep what they promise ---


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.001, 10), max_size=4), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_a_resample_is_as_if_its_values_were_written_out(values: list[list[float]], random: Any) -> None:
    drawn_often = np.array([random.randrange(4) for _ in values])
    flat = [(value, owner) for owner, each in enumerate(values) for value in each]
    flat.sort()
    sample = Sample(np.array([v for v, _ in flat]), np.array([o for _, o in flat], dtype=np.int64), len(values))
    written_out = [value for value, owner in flat for _ in range(drawn_often[owner])]
    found = intervals._resampled(sample, drawn_often, STATISTICS)
    if written_out:
        expected = [np.mean(written_out), *np.percentile(written_out, (50, 90, 99))]
        assert found == pytest.approx(expected)
    else:
        assert all(map(math.isnan, found))


def test_intervals_by_requests_have_the_true_change_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 300)
    rng = np.random.default_rng(0)
    trials, count = 120, 80
    hits = 0
    for _ in range(trials):
        of_request = rng.gamma(4, 1.0, count)  # the same on both sides
        sides = [of_request * rng.lognormal(0.0, 0.2, count) * factor for factor in (1.0, 1.1)]
        samples = [Sample(np.sort(side), np.argsort(side), count) for side in sides]
        (found,) = by_requests(samples[0], samples[1], ["mean"], is_paired=True, is_ratio=True)
        assert found is not None
        hits += found.low <= 0.1 <= found.high
    assert CONFIDENCE - 0.06 <= hits / trials <= 0.995


def test_runs_that_are_alike_are_rarely_told_apart() -> None:
    rng = np.random.default_rng(0)
    found = [by_runs(rng.normal(0, 1, 3).tolist(), rng.normal(0, 1, 4).tolist()) for _ in range(400)]
    assert 0.02 <= np.mean([not each.low <= 0 <= each.high for each in found]) <= 0.08


# --- what is said of it ---


def test_worse_is_what_is_worse_for_sure(tmp_path: Path) -> None:
    first = result(tmp_path / "a", *(drawn(seed) for seed in range(4)))
    second = result(tmp_path / "b", *(drawn(9 + seed, slower=1.3) for seed in range(4)))
    found = compare((first, second))
    assert {row.figure.name for row in found.worse_by(0.15)} >= {"TPOT mean", "ITL mean", "ITL p50"}
    assert found.worse_by(0.6) == []
    back = compare((second, first))
    assert back.worse_by(0.0) == []
    assert rows(back)["ITL mean"].verdict == "better"


def test_the_table_and_the_document_name_everything(tmp_path: Path) -> None:
    first = result(tmp_path / "a.json", drawn(0), drawn(1), max_num_seqs=8, machine={"load_before": 0.25})
    second = result(
        tmp_path / "b.json", drawn(2), drawn(3), max_num_seqs=16, dtype="float32", machine={"load_before": 4.0}
    )
    found = compare((first, second), anyway=True)
    text = io.StringIO()
    Console(file=text, width=200).print(as_table(found))
    for part in (
        "b.json against", "output rate, tok/s", "ITL p99, ms", "failed, %", "95 % interval", f"p, {WELCH}", "points",
        "before each: 0.25, 4.0 processes at work, on 2 cores", "not the same: options.dtype: none -> float32",
        "options.max_num_seqs: 8 -> 16", found.method,
    ):  # fmt: skip
        assert part in text.getvalue()
    document = json.loads(json.dumps(found.to_json()))
    by_name = {each["figure"]: each for each in document["figures"]}
    assert by_name.keys() == rows(found).keys()
    itl = by_name["ITL mean"]
    assert itl["low"] <= itl["change"] <= itl["high"]
    assert (itl["test"], itl["is_change"]) == (WELCH, "ratio less 1")
    assert document["obstacles"] == [{"field": "options.dtype", "first": None, "second": "float32"}]
