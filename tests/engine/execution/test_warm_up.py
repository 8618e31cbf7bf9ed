"""Warm-up measures the engine, and decides from that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock.engine.execution.warm_up as warm_up_module
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.deployment import deploy
from penstock.engine.execution.step_memory import Measured, StepMemory
from penstock.engine.execution.warm_up import LOOP_STEPS, choose_decode_steps, measure_steps, warm_up
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.scheduling.pace import StepTimes
from tests.engine.engines import SMALL, drive


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return Engine.from_checkpoint(tiny_model, replace(SMALL, max_batch_tokens=32, decode_steps=None))


def test_times_are_measured_for_every_bucket(engine: Engine) -> None:
    times = measure_steps(engine._runner)
    assert set(times.prompt_s) == set(engine._runner.geometry.token_buckets)
    assert set(times.decode_s) == set(engine._runner.geometry.row_buckets)
    assert min(*times.prompt_s.values(), *times.decode_s.values()) > 0
    assert times.pair_s >= 0
    request = Request("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert drive(engine, [request])["a", 0].finish_reason == "length"  # what was measured left nothing behind


def test_several_decode_steps_are_taken_where_they_are_quicker_and_short(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {1: 0.008, LOOP_STEPS: 0.004}
    monkeypatch.setattr(warm_up_module, "time_decoding", lambda runner, num_rows, num_steps: seconds[num_steps])
    short = StepTimes({}, {16: 0.001, 32: 0.0012, 48: 0.002})
    assert choose_decode_steps(engine._runner, short) == {16: LOOP_STEPS, 32: LOOP_STEPS}  # 48 would show in the stream
    seconds[LOOP_STEPS] = 0.0079  # hardly faster
    assert choose_decode_steps(engine._runner, short) == {}
    seconds[LOOP_STEPS] = 0.004
    assert choose_decode_steps(engine._runner, StepTimes({}, {16: 0.1})) == {}
    monkeypatch.undo()
    assert warm_up_module.time_decoding(engine._runner, 16, 1) > 0
    assert warm_up_module.time_decoding(engine._runner, 16, LOOP_STEPS) > 0


def test_after_warm_up_nothing_compiles_and_progress_counts_every_step(engine: Engine) -> None:
    seen: list[tuple[int, int, str]] = []
    geometry = engine._runner.geometry
    pace = warm_up(
        engine._runner,
        lambda *progress: seen.append(progress),
        decode_steps=2,
        prefill_share=1.0,
        memory=StepMemory(None),
    )
    num_steps = len(geometry.token_buckets) + len(geometry.row_buckets) + len(geometry.extended_row_buckets) + 1
    num_loops = len(geometry.row_buckets)
    assert [done for done, *_ in seen] == [*range(1, num_steps + 1), *range(1, num_loops + 1)]
    assert [total for _, total, _ in seen] == [num_steps] * num_steps + [num_loops] * num_loops
    assert pace.decode_steps == dict.fromkeys(geometry.row_buckets, 2)
    engine._pace = pace
    requests = [
        Request(f"r{i}", tuple(range(i, i + 20)), SamplingParams(max_tokens=7, logprobs=i or None)) for i in range(3)
    ]
    drive(engine, requests)
    assert engine.stats().compiles_after_warmup_total == 0


def test_a_second_start_measures_nothing_that_takes_long(engine: Engine, tmp_path: Path) -> None:
    runner, memory = engine._runner, StepMemory(tmp_path, "facts")
    decode_s = dict.fromkeys(runner.geometry.row_buckets, 7.0) | {16: 1e-9}
    times = StepTimes(dict.fromkeys(runner.geometry.token_buckets, 7.0), decode_s, 0.5)
    memory.keep(Measured(times, {16: LOOP_STEPS}))
    runs: list[Any] = []
    dispatch = runner.dispatch

    def counted(batch: Any) -> Any:
        runs.append(batch)
        return dispatch(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "dispatch", counted)
        pace = warm_up(runner, decode_steps=None, prefill_share=1.0, memory=memory)
    assert pace.times is not None
    assert (replace(pace.times, loop_s={}), pace.decode_steps) == (times, {16: LOOP_STEPS})
    assert sum(batch.num_steps == 1 for batch in runs) == 2  # the brief one, plain and with options
    assert memory.recall() == Measured(times, {16: LOOP_STEPS})


@pytest.mark.parametrize(
    ("kept_loops", "waits"),
    [(None, [True]), ({}, [False]), ({16: LOOP_STEPS}, [True])],
    ids=["a first start", "a second start", "a second start with loops"],
)
def test_pages_are_waited_for_only_before_what_is_timed_with_care(
    kept_loops: dict[int, int] | None, waits: list[bool], engine: Engine, tmp_path: Path
) -> None:
    runner, memory = engine._runner, StepMemory(tmp_path, "facts")
    geometry = runner.geometry
    if kept_loops is not None:
        times = StepTimes(dict.fromkeys(geometry.token_buckets, 7.0), dict.fromkeys(geometry.row_buckets, 7.0), 0.5)
        memory.keep(Measured(times, kept_loops))
    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "move_to_huge_pages", lambda *, wait: seen.append(wait))
        patch.setattr(warm_up_module, "choose_decode_steps", lambda *_: {})
        warm_up(runner, decode_steps=None, prefill_share=1.0, memory=memory)
    assert seen == waits


def test_what_was_measured_is_for_this_engine_alone(tiny_model: Path, tmp_path: Path) -> None:
    def memory_of(config: EngineConfig) -> StepMemory:
        deployment = deploy(config, read_model_config(tiny_model, "auto"))
        return StepMemory(tmp_path, deployment.model, deployment.geometry(64), config)

    measured = Measured(StepTimes({16: 0.5}, {16: 0.6}, 0.1), {})
    assert memory_of(SMALL).recall() is None
    memory_of(SMALL).keep(measured)
    assert memory_of(SMALL).recall() == measured
    assert memory_of(replace(SMALL, max_batch_tokens=32)).recall() is None
    assert memory_of(replace(SMALL, dtype="bfloat16")).recall() is None


def test_a_file_that_is_broken_or_cannot_be_written_is_as_none(tmp_path: Path) -> None:
    memory = StepMemory(tmp_path, "facts")
    measured = Measured(StepTimes({16: 0.5}, {16: 0.6}, 0.1), {16: 8})
    memory.keep(measured)
    assert memory.recall() == measured
    (file,) = (tmp_path / "step_times").iterdir()
    for text in ("", "[]", "{}", '{"prompt_s": {"x": 1}, "decode_s": {}, "pair_s": 0, "loops": {}}', "\x00"):
        file.write_text(text)
        assert memory.recall() is None
    (tmp_path / "file").write_text("")
    StepMemory(tmp_path / "file", "facts").keep(measured)
    assert StepMemory(tmp_path / "file", "facts").recall() is None
    assert StepMemory(None).recall() is None
