from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import SMALL, drive

import penstock.engine.execution.warm_up as warm_up_module
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.errors import ConfigError
from penstock.engine.execution.batch import Geometry
from penstock.engine.execution.warm_up import LOOP_STEPS, choose_decode_steps, measure_steps
from penstock.engine.scheduling.pace import MIN_CHUNK, Pace, StepTimes
from penstock.engine.scheduling.page_pool import PagePool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence

LINEAR = StepTimes(
    prompt_s={16: 0.016, 32: 0.032, 64: 0.064, 128: 0.128, 256: 0.256}, decode_s={16: 0.018, 32: 0.036, 64: 0.072}
)
PACED = Pace(LINEAR, max_slowdown=2.0)


def room(pace: Pace, lengths: list[int], context: int = 0, num_prompts: int = 1) -> int | None:
    return pace.room(lengths, num_prompts).tokens(context)


def test_a_prompt_may_slow_a_step_down_by_the_factor_and_no_more() -> None:
    # 16 decode in 18 ms, of which sampling is 2 ms: 36 ms in all leave 34 for tokens, and those are 32 tokens.
    assert room(PACED, [10] * 16) == 16
    assert room(PACED, [10] * 10) == 22
    # 64 decode in 72 ms: 144 - 8 = 136 ms are 128 tokens.
    assert room(PACED, [10] * 64) == 64


def test_where_nothing_decodes_or_nothing_was_measured_there_is_no_limit() -> None:
    assert room(PACED, []) is None
    assert room(Pace(), [10] * 16) is None
    assert room(Pace(LINEAR, max_slowdown=None), [10] * 16) is None


def test_the_more_prompts_wait_the_larger_are_chunks() -> None:
    assert [room(PACED, [10] * 16, num_prompts=count) for count in (1, 2, 8)] == [16, 48, 240]


def test_a_chunk_far_behind_in_its_prompt_is_smaller_because_it_attends_to_more() -> None:
    pace = replace(PACED, times=replace(LINEAR, pair_s=1e-6))
    near, far = room(pace, [0] * 64, context=0), room(pace, [0] * 64, context=1000)
    assert near == 64
    assert far == MIN_CHUNK  # 8 ms that are left pay for 8 tokens behind 1,000 others
    assert room(pace, [1000] * 64, context=1000) == 64  # beside streams that attend to as much


def test_every_step_has_room_for_a_few_tokens_whatever_the_times_say() -> None:
    steep = StepTimes(prompt_s={16: 0.01, 32: 1.0, 64: 9.0}, decode_s={16: 0.01, 32: 1.0})
    prompts = Pace(steep, max_slowdown=1.0).room([10] * 16, 1)
    assert prompts.tokens(0) == MIN_CHUNK
    prompts.take(10, 0)
    assert prompts.tokens(0) == MIN_CHUNK - 10
    prompts.take(MIN_CHUNK - 10, 0)
    assert prompts.tokens(0) == 0


def test_decode_steps_are_those_of_the_bucket() -> None:
    pace = Pace(decode_steps={16: 8, 32: 4})
    assert [pace.max_steps(rows) for rows in (1, 16, 17, 33)] == [8, 8, 4, 1]


def test_the_scheduler_computes_a_prompt_in_chunks_beside_running_sequences_and_at_once_alone() -> None:
    scheduler = Scheduler(
        PagePool(200, 16, prefix_caching=False), max_num_seqs=20, max_batch_tokens=256, max_model_len=1000
    )
    for i in range(16):
        scheduler.add(sequence(f"s{i}", 2, i))
    assert [plan.num_tokens for plan in steps(scheduler, 1)] == [32]  # nobody decodes yet
    scheduler.add(sequence("long", 100, 16))
    assert [plan.num_tokens for plan in steps(scheduler, 7)] == [32] * 6 + [16 + 100 - 6 * 16]
    assert [plan.num_tokens for plan in steps(scheduler, 1)] == [17]
    scheduler.check()


def sequence(name: str, num_prompt: int, arrival: int) -> Sequence:
    request = Request(name, tuple(range(num_prompt)), SamplingParams(max_tokens=50))
    return Sequence(request, 0, arrival)


def steps(scheduler: Scheduler, count: int) -> list[Any]:
    plans = []
    for _ in range(count):
        plan = scheduler.plan(PACED)
        assert plan is not None
        for row in plan.rows:
            scheduler.commit(row, 7 if row.num_sampled else None)
        plans.append(plan)
    return plans


def test_buckets_lie_closer_where_compiling_is_quick() -> None:
    geometry = Geometry(48, 256, 100, 4, 10)
    assert geometry.token_buckets == (16, 32, 48, 64, 96, 128, 192, 256)
    assert geometry.row_buckets == (16, 32, 48)
    assert replace(geometry, few_shapes=True).token_buckets == (16, 32, 64, 128, 256)
    assert replace(geometry, few_shapes=True).row_buckets == (16, 32, 64)


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return Engine.from_checkpoint(tiny_model, replace(SMALL, max_batch_tokens=64, decode_steps=None))


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


@pytest.mark.parametrize("value", [0.5, float("nan"), -1])
def test_a_slowdown_below_one_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="max_prefill_slowdown must be 1 or more"):
        EngineConfig(max_prefill_slowdown=value)
