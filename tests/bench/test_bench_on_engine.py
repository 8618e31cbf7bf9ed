"""Loads on an engine alone."""

from __future__ import annotations

import pytest

from penstock.tools.bench.on_engine import run_on_engine
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.arrivals import Arrivals
from penstock.tools.bench.traffic.datasets import BenchRequest
from penstock.tools.bench.traffic.load import Load
from penstock.tools.chaos.fake_engine import FakeEngine, FakeText

REQUESTS = tuple(BenchRequest((7,) * length, 5) for length in (3, 4, 5, 6))


NUM_DONE_AT_END = len(REQUESTS)


def test_an_engine_answers_the_whole_load() -> None:
    seen: list[tuple[int, int]] = []
    load = Load(REQUESTS)
    recorder = run_on_engine(FakeEngine(), FakeText(), load, lambda done, total, what: seen.append((done, total)))
    run = Summary.of(recorder)
    assert (run.num_requests, run.num_failed, run.prompt_tokens, run.output_tokens) == (4, 0, 18, 20)
    assert run.tokens_per_delivery == 1.0
    assert seen[-1] == (NUM_DONE_AT_END, 4)


def test_prompts_of_all_kinds_reach_an_engine() -> None:
    chat = BenchRequest(({"role": "user", "content": "hi"},), 2)
    recorder = run_on_engine(FakeEngine(), FakeText(), Load((BenchRequest("hello", 2), chat)))
    assert [line.num_prompt for line in recorder.timelines] == [5, len("user:hi")]


def test_a_closed_load_never_has_more_under_way() -> None:
    engine = FakeEngine()
    load = Load(REQUESTS, Arrivals("closed", concurrency=2))
    assert Summary.of(run_on_engine(engine, FakeText(), load)).num_failed == 0
    assert engine.most_rows == 2


def test_open_arrivals_count_from_when_they_were_due() -> None:
    load = Load(REQUESTS, Arrivals("constant", rate=50.0))
    recorder = run_on_engine(FakeEngine(step_s=0.03), FakeText(), load)
    arrivals = [line.arrival_s - recorder.start_s for line in recorder.timelines]
    assert arrivals == pytest.approx([0.0, 0.02, 0.04, 0.06])
