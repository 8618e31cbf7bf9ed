"""From what was noted to what is reported."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.worker.bench.errors import ImpossibleLoad
from penstock.worker.bench.machine import describe_machine
from penstock.worker.bench.recorder import Recorder, Timeline, end, fail, note
from penstock.worker.bench.report import Report, append_result
from penstock.worker.bench.summary import Spread, Summary, Target, median_run


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


def test_deliveries_without_tokens_do_not_count() -> None:
    line = Timeline(0.0)
    note(line, 0, 1.0)
    note(line, 2, 3.0)
    assert (line.stamps_s, line.num_output) == ([3.0], 2)


def test_the_median_run_is_one_of_them() -> None:
    slow, middle, fast = (Summary.of(recorded(timeline(0.0, (seconds, 8)))) for seconds in (4.0, 2.0, 1.0))
    assert median_run([fast, slow, middle]) == 2
    assert median_run([fast, slow]) == 1


def test_a_target_must_be_above_nothing() -> None:
    with pytest.raises(ImpossibleLoad, match="--slo-itl-ms must be above 0, not 0"):
        Target(itl_ms=0.0)


def report() -> Report:
    recorder = recorded(timeline(0.0, (0.2, 1), (0.3, 1)), timeline(0.1, (0.4, 3)))
    run = Summary.of(recorder, Target(ttft_ms=250.0))
    return Report.of("a run", {"model": "x"}, [(run, recorder, 0.25)], describe_machine())


def test_tables_name_every_figure() -> None:
    text = io.StringIO()
    Console(file=text, width=160).print(report().tables())
    for part in ("a run", "output tok/s", "good req/s", "50%", "TTFT", "TPOT", "ITL", "E2E", "p99", "250.0"):
        assert part in text.getvalue()


def test_json_says_what_it_was_measured_on(tmp_path: Path) -> None:
    report().write_json(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["options"] == {"model": "x"}
    assert found["runs"][0]["ttft_ms"]["p50"] == 250.0
    assert found["runs"][0]["cpu_s"] == 0.25
    assert found["machine"]["versions"]["numpy"]
    assert found["machine"]["cores"] >= 1
    assert found["errors"] == []


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    for place in range(2):
        append_result(tmp_path / "results" / "some.jsonl", {"place": place})
    lines = (tmp_path / "results" / "some.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in lines] == [0, 1]
    assert json.loads(lines[0])["on"]["processor"]


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from penstock.worker.bench.plot import write_plot  # imports matplotlib

    write_plot(report(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")
