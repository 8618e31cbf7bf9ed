"""Steps on the device, without an engine: what they read from the step before, what is kept, what starts over."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.engine.attention import CacheSpec, KVCacheSpec, XlaAttention
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import BatchBuilder
from penstock.engine.execution.runner import Runner
from penstock.engine.execution.sampling_rows import NOTHING_LEFT
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence
from tests.engine.engines import TINY

CONFIG = TINY.first_layers(1)
(HEADS,) = CONFIG.attentions
GEOMETRY = Geometry(max_num_seqs=4, max_batch_tokens=16, max_model_len=64, page_size=8, vocab_size=CONFIG.vocab_size)


@pytest.fixture(scope="module")
def runner() -> Runner:
    attention = XlaAttention()
    spec = CacheSpec((KVCacheSpec(1, 33, 8, HEADS.num_kv_heads, HEADS.head_dim, attention.cache_dtype(CONFIG.dtype)),))
    return Runner(random_model(CONFIG, 0), attention, spec, GEOMETRY)


class Steps:
    """Drives a runner with sequences; tokens are committed as soon as they are there."""

    def __init__(self, runner: Runner, pace: Pace | None = None) -> None:
        runner.reset_cache()
        self.runner, self.pace = runner, pace or Pace()
        self.scheduler = Scheduler(PagePool(33, 8), max_num_seqs=4, max_batch_tokens=16, max_model_len=64)
        self.builder = BatchBuilder(GEOMETRY, ())
        self.num_dispatches = 0

    def add(self, *prompt: int, **params: int) -> Sequence:
        sequence = Sequence(Request(str(prompt), prompt, SamplingParams(temperature=0.0, **params)), 0, sum(prompt))  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def dispatch(self, *, commit: bool = True) -> list[list[int]]:
        plan = self.scheduler.plan(self.pace)
        assert plan is not None
        self.num_dispatches += 1
        in_flight = self.runner.dispatch(self.builder.build(plan))
        if not commit:
            return []
        tokens = in_flight.token_ids()
        for sampled in tokens:
            for row, token_id in zip(plan.sampled, sampled, strict=True):
                self.scheduler.commit(row, token_id)
        return tokens


def test_a_decoding_row_reads_on_the_device_what_the_step_before_sampled(runner: Runner) -> None:
    known = Steps(runner)
    sequence = known.add(1, 2, 3)
    tokens = [known.dispatch()[0][0] for _ in range(4)]
    assert sequence.token_ids == [1, 2, 3, *tokens]
    blind = Steps(runner)
    blind.add(1, 2, 3)
    for _ in range(3):
        blind.dispatch(commit=False)  # the host never sees what it goes on with
    assert blind.dispatch()[0][0] == tokens[3]


def test_a_prompt_in_chunks_gives_the_token_of_the_whole(runner: Runner) -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(0, CONFIG.vocab_size, 16))
    whole = Steps(runner)
    whole.add(*prompt)
    expected = whole.dispatch()
    chunked = Steps(runner)
    chunked.add(*range(9))  # shares the step, so that the prompt is cut
    long = chunked.add(*prompt)
    while len(long.token_ids) == 16:
        chunked.dispatch()
    assert long.token_ids[16] == expected[0][0]


def test_a_step_that_samples_nothing_can_be_waited_for(runner: Runner) -> None:
    steps = Steps(runner)
    steps.add(*range(30))
    plan = steps.scheduler.plan(Pace())
    assert plan is not None
    assert not plan.sampled
    in_flight = runner.dispatch(steps.builder.build(plan))
    assert (in_flight.token_ids(), in_flight.logprobs()) == ([[]], None)


def test_log_probabilities_come_with_extended_sampling_alone(runner: Runner) -> None:
    steps = Steps(runner)
    steps.add(1, 2, 3, logprobs=3)
    plan = steps.scheduler.plan(Pace())
    assert plan is not None
    in_flight = runner.dispatch(steps.builder.build(plan))
    assert in_flight.logprobs() is not None
    [logprobs] = in_flight.logprobs() or []
    assert in_flight.token_ids()[0][0] == logprobs.top_ids[0, 0]  # greedy
    np.testing.assert_allclose(logprobs.sampled[0], logprobs.top[0, 0], rtol=1e-5)


def test_a_cache_that_starts_over_is_empty(runner: Runner) -> None:
    Steps(runner).runner.reset_cache()
    steps = Steps(runner)
    steps.add(1, 2, 3)
    steps.dispatch()
    assert any(array.any() for array in jax.tree.leaves(runner._cache))
    runner.reset_cache()
    assert not any(array.any() for array in jax.tree.leaves(runner._cache))


def test_a_shape_compiles_once(runner: Runner) -> None:
    first = Steps(runner)
    first.add(1, 2)
    first.dispatch()
    runner.start_watch()
    again = Steps(runner)
    again.add(4, 5, 6)
    compiles = runner.compiles_after_warmup  # making an empty cache may compile
    again.dispatch()
    again.dispatch()
    assert runner.compiles_after_warmup == compiles


def only(num_rows: int, **allowed: tuple[int, ...]) -> np.ndarray:
    """Returns masks of `num_rows` rows that restrict the rows named `r0`, `r1` ... to some tokens."""
    masks = np.full((num_rows, GEOMETRY.mask_words), -1, np.int32)
    for name, ids in allowed.items():
        row = masks[int(name[1:])].view(np.uint32)
        row[:] = 0
        for token in ids:
            row[token // 32] |= np.uint32(1 << token % 32)
    return masks


def test_masks_that_come_after_the_backbone_say_what_each_row_may_draw(runner: Runner) -> None:
    free = Steps(runner)
    free.add(1, 2, 3), free.add(7, 8)
    (expected,) = free.dispatch()
    last = CONFIG.vocab_size - 1
    for params in ({}, {"logprobs": 1}):  # rows that need the extended head anyway, and rows that do not
        steps = Steps(runner)
        steps.add(1, 2, 3, **params), steps.add(7, 8)
        plan = steps.scheduler.plan(Pace())
        assert plan is not None
        started = runner.start(steps.builder.build(plan))
        in_flight = runner.finish(started, only(2, r0=(last,)))
        assert in_flight.token_ids() == [[last, expected[1]]]


def test_a_row_whose_mask_is_empty_gives_no_token(runner: Runner) -> None:
    steps = Steps(runner)
    steps.add(1, 2, 3)
    plan = steps.scheduler.plan(Pace())
    assert plan is not None
    started = runner.start(steps.builder.build(plan))
    assert runner.finish(started, only(1, r0=())).token_ids() == [[NOTHING_LEFT]]


def test_tokens_of_a_prompt_are_scored_as_if_they_were_sampled(runner: Runner) -> None:
    prompt = (5, 17, 3, 42)
    steps = Steps(runner)
    steps.add(*prompt, logprobs=3)
    plan = steps.scheduler.plan(Pace())
    assert plan is not None
    in_flight = runner.dispatch(steps.builder.build(replace(plan, rows=(plan.rows[0]._replace(num_scored=3),))))
    [scored] = in_flight.logprobs() or []
    assert in_flight.token_ids()[0][:3] == list(prompt[1:])
    for place in range(4):  # the last one samples
        alone = Steps(runner)
        alone.add(*prompt[: place + 1], logprobs=3)
        plan = alone.scheduler.plan(Pace())
        assert plan is not None
        [expected] = runner.dispatch(alone.builder.build(plan)).logprobs() or []
        np.testing.assert_array_equal(scored.top_ids[place, :3], expected.top_ids[0, :3])
        np.testing.assert_allclose(scored.top[place], expected.top[0], atol=1e-4)
        likely = dict(zip(scored.top_ids[place].tolist(), scored.top[place].tolist(), strict=True))
        token_id = in_flight.token_ids()[0][place]
        assert scored.sampled[place] == pytest.approx(likely.get(token_id, scored.sampled[place]), abs=1e-5)
        assert scored.sampled[place] <= scored.top[place, 0]
