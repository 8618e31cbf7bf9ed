"""Steps of a real engine are recorded one by one; times are fitted to them, and can be kept."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.parts.step_recording import MeasuredSteps, StepRecord, recorded
from penstock.engine import Engine, Request, SamplingParams
from penstock.tools.plan.step_times import StepShape
from tests.engine.engines import drive


def usual_s(shape: StepShape) -> float:
    """Returns the time of a step on the device that is to be modelled."""
    return shape.num_steps * (2e-3 + 50e-6 * shape.num_tokens + 10e-6 * shape.num_sampled + 1e-7 * shape.num_pairs)


def records(noise: float) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    found = []
    for count in range(400):
        num_rows, start = int(rng.integers(1, 40)), int(rng.integers(1, 500))
        rows = ((start, 1),) * num_rows
        shape = (
            StepShape((*rows, (0, int(rng.integers(2, 400)))), num_rows + 1)
            if count % 4 == 0
            else StepShape(rows, num_rows)
        )
        step_s = usual_s(shape) * (1 + noise * float(rng.uniform(-1, 1)))
        found.append(StepRecord(shape, 1e-3 + 1e-5 * num_rows, 2e-3, step_s if count % 7 else None))
    return found


def test_what_steps_hold_tells_how_long_they_take() -> None:
    steps = MeasuredSteps.fitted(records(0.0))
    for shape in (StepShape(((100, 1),) * 20, 20), StepShape(((0, 300),), 1), StepShape(((400, 1),) * 8, 8, 4)):
        assert steps.usual_s(shape) == pytest.approx(usual_s(shape), rel=0.05)
        assert steps.step_s(shape) == pytest.approx(usual_s(shape), rel=0.1)
    assert steps.plan_s(StepShape(((100, 1),) * 20, 20)) == pytest.approx(1.2e-3, rel=0.05)
    assert steps.commit_s(StepShape(((100, 1),) * 20, 20)) == pytest.approx(2e-3, rel=0.05)


def test_draws_are_as_uneven_as_the_records_and_repeat_with_their_seed() -> None:
    steps, shape = MeasuredSteps.fitted(records(0.4)), StepShape(((100, 1),) * 20, 20)
    drawn = [steps.step_s(shape) for _ in range(500)]
    assert statistics.fmean(drawn) == pytest.approx(usual_s(shape), rel=0.1)
    assert min(drawn) < 0.75 * usual_s(shape)
    assert max(drawn) > 1.25 * usual_s(shape)
    assert [replace(steps, seed=3).step_s(shape)] * 2 == [replace(steps, seed=3).step_s(shape) for _ in range(2)]


def test_what_was_fitted_can_be_kept(tmp_path: Path) -> None:
    steps = MeasuredSteps.fitted(records(0.2))
    steps.write(tmp_path / "steps.json")
    assert MeasuredSteps.read(tmp_path / "steps.json") == steps


def test_each_step_of_an_engine_is_noted_and_the_engine_is_as_before(engine: Engine) -> None:
    clock, before = engine._clock, engine.stats().steps_total
    with recorded(engine) as found:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        drive(engine, [Request(str(i), tuple(range(10 * i, 10 * i + 10)), params) for i in range(3)])
    assert len(found) == engine.stats().steps_total - before
    assert sum(record.shape.num_sampled for record in found) == 18
    assert all(record.plan_s > 0 and record.commit_s > 0 for record in found)
    assert engine._clock is clock
    assert "build" not in vars(engine._builder)
