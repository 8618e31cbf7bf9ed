"""A file from `--json` can be read again, or its error is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.tools.bench.errors import BadResult
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.recorder import Timeline, fail
from penstock.tools.bench.report import Report
from penstock.tools.bench.result_file import read_result
from penstock.tools.bench.summary import Summary, Target
from tests.bench.bench_timelines import recorded, timeline


def written(path: Path) -> Report:
    failed = Timeline(5.3)
    fail(failed, "gone", 6.0)
    recorder = recorded(timeline(5.0, (5.2, 1), (5.3, 1)), timeline(5.1, (5.4, 3)), failed)
    recorder.start_s = 5.0
    run = Summary.of(recorder, Target(ttft_ms=250.0))
    load = LoadOptions(requests=3).load(1000)
    report = Report.of("a run", {"slo_ttft_ms": 250.0}, [(run, recorder, 0.25)], describe_machine(), load)
    report.write_json(path)
    return report


def test_what_is_read_is_what_was_measured(tmp_path: Path) -> None:
    report = written(tmp_path / "r.json")
    found = read_result(tmp_path / "r.json")
    assert found.runs == report.runs
    assert (found.cpu_s, found.title, found.target) == ((0.25,), "a run", Target(ttft_ms=250.0))
    assert found.load == {"requests": 3, "digest": LoadOptions(requests=3).load(1000).digest()}
    whole, joined, failed = found.recorders[0].timelines
    assert (whole.arrival_s, whole.stamps_s, whole.counts, whole.end_s) == (0.0, [0.2, 0.3], [1, 1], 0.3)
    assert (joined.counts, joined.finish_reason, joined.num_prompt) == ([3], "length", 10)
    assert (failed.error, failed.stamps_s) == ("gone", [])


def test_one_request_is_one_line(tmp_path: Path) -> None:
    written(tmp_path / "r.json")
    lines = [line for line in (tmp_path / "r.json").read_text().splitlines() if "arrival_ms" in line]
    assert len(lines) == 3
    assert json.loads(lines[0].rstrip(","))["stamps_ms"] == [200.0, 300.0]


def test_loads_that_differ_in_anything_have_other_digests() -> None:
    loads: list[dict[str, Any]] = [{}, {"seed": 1}, {"temperature": 0.5}, {"arrivals": "constant", "rate": 2.0}]
    digests = {LoadOptions(requests=3, **options).load(1000).digest() for options in loads}
    assert len(digests) == 4


def changed(path: Path, change: Any) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("timelines"), "timelines"),
        (lambda found: found["timelines"].append([]), "1 runs have the timelines of 2"),
        (lambda found: found["timelines"][0][0].update(counts=[1]), "2 deliveries have the counts"),
        (lambda found: found["timelines"][0][0].update(stamps_ms=[9.0, 3.0]), "not in the order of time"),
        (lambda found: found["timelines"][0][0].update(num_prompt=-1), "num_prompt"),
        (lambda found: found["options"].update(slo_ttft_ms=-1), "--slo-ttft-ms must be above 0, not -1"),
        (lambda found: found.pop("runs"), "runs"),
    ],
)
def test_a_file_that_is_no_result_says_why(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "r.json"
    written(path)
    changed(path, change)
    with pytest.raises(BadResult, match=message) as refused:
        read_result(path)
    assert str(refused.value).startswith(str(path))


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(BadResult, match="cannot be read"):
        read_result(tmp_path / "nowhere.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadResult, match="not JSON"):
        read_result(tmp_path / "x.json")
