"""Loads on a real queue with a fake engine."""

from __future__ import annotations

import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.on_service import run_on_service
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.arrivals import Arrivals
from penstock.tools.bench.traffic.datasets import BenchRequest
from penstock.tools.bench.traffic.load import Load
from penstock.tools.chaos.fake_engine import FakeEngine
from tests.support.programs.worker_harness import running_worker

REQUESTS = tuple(BenchRequest((7,) * length, 5) for length in (3, 4, 5, 6))


async def test_a_service_answers_the_whole_load(redis_url: str) -> None:
    async with running_worker(redis_url):
        recorder = await run_on_service(redis_url, "q", Load(REQUESTS), num_clients=2)
    run = Summary.of(recorder)
    assert (run.num_requests, run.num_failed, run.prompt_tokens, run.output_tokens) == (4, 0, 18, 20)
    assert run.ttft_ms is not None


async def test_a_closed_load_through_a_service(redis_url: str) -> None:
    async with running_worker(redis_url) as running:
        load = Load(REQUESTS, Arrivals("closed", concurrency=1))
        recorder = await run_on_service(redis_url, "q", load)
        assert running.engine.most_rows == 1
    ends = [line.end_s for line in recorder.timelines]
    assert all(line.arrival_s >= (end or 0.0) for line, end in zip(recorder.timelines[1:], ends, strict=False))


async def test_requests_that_fail_are_counted_and_end_nothing(redis_url: str) -> None:
    load = Load((BenchRequest((7,) * 3, 5), BenchRequest((7,) * 50, 5)))
    async with running_worker(redis_url, FakeEngine(max_model_len=20)):
        recorder = await run_on_service(redis_url, "q", load)
    assert Summary.of(recorder).num_failed == 1
    assert "50 tokens" in (recorder.timelines[1].error or "")


async def test_a_reply_that_takes_too_long_has_failed(redis_url: str) -> None:
    recorder = await run_on_service(redis_url, "q", Load(REQUESTS[:1]), timeout_s=0.1)  # no worker is there
    assert Summary.of(recorder).num_failed == 1


@pytest.mark.parametrize(("option", "value"), [("num_clients", 0), ("timeout_s", 0.0)])
async def test_impossible_ways_to_send_are_refused(option: str, value: float) -> None:
    with pytest.raises(ImpossibleLoad, match="must be"):
        await run_on_service("redis://localhost:1", "q", Load(REQUESTS), **{option: value})  # type: ignore[arg-type]
