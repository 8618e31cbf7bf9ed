from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine import Request, SamplingParams
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import LONGEST_STEPS, MIN_CHUNK, Pace, StepTimes
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence

LINEAR = StepTimes(
    prompt_s={16: 0.016, 32: 0.032, 64: 0.064, 128: 0.128, 256: 0.256}, decode_s={16: 0.018, 32: 0.036, 64: 0.072}
)
PACED = Pace(LINEAR, prefill_share=0.25)  # 64 ms


def allowed(pace: Pace, lengths: list[int], context: int = 0, num_prompts: int = 1) -> int | None:
    return pace.prompt_budget(lengths, num_prompts).tokens(context)


def test_a_prompt_makes_a_step_longer_by_its_share_and_no_more() -> None:
    # 16 decode in 18 ms, of which sampling is 2 ms: 16 + 64 ms in all are 64 tokens.
    assert allowed(PACED, [10] * 16) == 48
    assert allowed(PACED, [10] * 9) == 55
    # 64 decode in 72 ms: 64 + 64 ms are 128 tokens.
    assert allowed(PACED, [10] * 64) == 64


def test_a_prompt_that_is_scored_pays_for_rows_too() -> None:
    # 32 decode in 36 ms: 65.3 ms for tokens are 64, of which 32 are free. Sampling 64 takes 4 ms more.
    pace = replace(PACED, prefill_share=0.13)
    prompts = pace.prompt_budget([10] * 32, 1)
    assert (prompts.tokens(0), prompts.tokens(0, are_scored=True)) == (32, MIN_CHUNK)
    assert Pace().prompt_budget([10] * 8, 1).tokens(0, are_scored=True) is None


def test_where_nothing_was_measured_there_is_no_limit_and_where_nothing_decodes_it_is_the_largest_step() -> None:
    assert allowed(Pace(prefill_share=0.25), [10] * 16) is None
    assert allowed(PACED, []) == 256
    assert allowed(Pace(LINEAR), [10] * 16) == 240


def test_the_more_prompts_wait_the_larger_are_chunks_and_beside_few_streams_nothing_bounds_them() -> None:
    assert [allowed(PACED, [10] * 16, num_prompts=count) for count in (1, 2, 4, 7, 8)] == [48, 48, 112, 112, 240]
    assert [allowed(PACED, [10] * count) for count in (1, 2, 4)] == [255, 254, 124]


def test_a_chunk_far_behind_in_its_prompt_is_smaller_because_it_attends_to_more() -> None:
    pace = replace(PACED, times=replace(LINEAR, pair_s=1e-6))
    near, far = allowed(pace, [0] * 32, context=0), allowed(pace, [0] * 32, context=1000)
    assert near == 32
    assert far == 32  # 96 ms, of which 64 are for 64 tokens, pay for 32 behind 1,000 others
    assert allowed(pace, [0] * 32, context=1600) == 20
    assert allowed(pace, [1000] * 32, context=1600) == 20  # whatever the streams attend to


@pytest.mark.parametrize("num_decoding", [0, 1, 16])
def test_far_into_a_prompt_a_chunk_takes_little_more_than_the_longest_step(num_decoding: int) -> None:
    times = replace(LINEAR, pair_s=1e-7)
    for context in (0, 1_000, 10_000, 30_000):
        count = allowed(Pace(times), [0] * num_decoding, context)
        assert count is not None
        step_s = times.step_s(num_decoding + count, num_decoding, count * context)
        assert step_s <= LONGEST_STEPS * times.longest_s + times.decoding_s(num_decoding, 0)
        assert (num_decoding + count == 256) == (context <= 1_000)  # where attention is brief, chunks are whole


def test_a_long_prompt_and_short_ones_share_the_time_and_neither_starves() -> None:
    """The long one stands so far in that a chunk of it is mostly attention."""
    pace = Pace(replace(LINEAR, pair_s=2e-6))
    scheduler = Scheduler(
        PagePool(2000, 16, prefix_caching=False), max_num_seqs=20, max_batch_tokens=256, max_model_len=9000
    )
    scheduler.add(long := sequence("long", 8000, 0))
    while long.num_computed < 6000:
        alone = next(iter(steps(scheduler, 1, pace))).num_tokens
    for place in range(1, 6):
        scheduler.add(short := sequence(f"s{place}", 20, place))
        before = long.num_computed
        steps(scheduler, 1, pace)
        assert short.num_computed == 20
        assert long.num_computed - before >= alone / 3
        scheduler.finish(short)


def test_a_step_is_foretold_from_what_was_measured() -> None:
    pace = replace(PACED, times=replace(LINEAR, pair_s=1e-6))
    assert pace.foretold_s(16, 16, 0) == pytest.approx(0.018)
    assert pace.foretold_s(70, 3, 1000) == pytest.approx(0.128 + 0.002 + 0.001)
    assert Pace().foretold_s(16, 16, 0) is None


def test_every_step_computes_a_few_tokens_whatever_the_times_say() -> None:
    steep = StepTimes(prompt_s={16: 0.01, 32: 1.0, 64: 9.0}, decode_s={16: 0.01, 32: 1.0})
    prompts = Pace(steep, prefill_share=0.0).prompt_budget([10] * 16, 1)
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
    assert [plan.num_tokens for plan in steps(scheduler, 3)] == [64, 64, 16 + 100 - 2 * 48]
    assert [plan.num_tokens for plan in steps(scheduler, 1)] == [17]
    scheduler.check()


def sequence(name: str, num_prompt: int, arrival: int) -> Sequence:
    request = Request(name, tuple(range(num_prompt)), SamplingParams(max_tokens=50))
    return Sequence(request, 0, arrival)


def steps(scheduler: Scheduler, count: int, pace: Pace = PACED) -> list[Any]:
    plans = []
    for _ in range(count):
        plan = scheduler.plan(pace)
        assert plan is not None
        for row in plan.rows:
            scheduler.commit(row, 7 if row.num_sampled else None)
        plans.append(plan)
    return plans
