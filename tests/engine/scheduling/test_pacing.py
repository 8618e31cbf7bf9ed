"""Effect of the default bound on prompts on first tokens and streams, on a device that is a table of times."""

from __future__ import annotations

import pytest

from benchmarks.pacing import DEVICES, simulated
from penstock.engine import EngineConfig
from penstock.engine.scheduling.pace import Pace

SHARE = EngineConfig().prefill_share
CAPACITY = {"tiny": 39.0, "qwen06": 2.7}  # requests per second


def figures(model: str, share: float, load: float | None, *, waits: bool = True) -> dict[str, float]:
    device = DEVICES[model]
    rate = None if load is None else load * CAPACITY[model]
    return simulated(device, Pace(device.times(), share), 64, rate, 3, waits=waits)


@pytest.mark.parametrize("model", DEVICES)
def test_prompts_are_bounded_where_that_costs_them_little_and_spares_streams_much(model: str) -> None:
    bounded, free = figures(model, SHARE, 0.8), figures(model, 1.0, 0.8)
    assert bounded["TTFT p50, ms"] <= 1.1 * free["TTFT p50, ms"]
    assert bounded["ITL p99, ms"] <= 0.7 * free["ITL p99, ms"]


@pytest.mark.parametrize("model", DEVICES)
def test_a_burst_takes_no_longer_than_without_a_bound(model: str) -> None:
    assert figures(model, SHARE, None)["seconds"] <= 1.02 * figures(model, 1.0, None)["seconds"]


@pytest.mark.parametrize("model", DEVICES)
def test_a_plan_made_late_brings_first_tokens_forward_and_costs_no_time(model: str) -> None:
    late, at_once = figures(model, SHARE, 0.4), figures(model, SHARE, 0.4, waits=False)
    assert late["TTFT p50, ms"] <= 0.9 * at_once["TTFT p50, ms"]
    assert late["seconds"] <= 1.005 * at_once["seconds"]
