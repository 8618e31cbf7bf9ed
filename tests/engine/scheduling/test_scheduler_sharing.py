"""Prompts share steps: a short prompt does not wait for a long one, nor a long one for a stream of short ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.scheduler_harness import PAGE, Harness

BUDGET = 16


def long_harness(**options: object) -> Harness:
    return Harness(num_pages=512, max_batch_tokens=BUDGET, max_model_len=1000, **options)  # type: ignore[arg-type]


def tokens_of(harness: Harness, *sequences: Sequence) -> tuple[int, ...]:
    """Returns how many tokens of the next step each sequence gets."""
    plan = harness.step()
    assert plan is not None
    taken = {row.sequence: row.num_tokens for row in plan.rows}
    assert taken.keys() <= set(sequences)
    return tuple(taken.get(sequence, 0) for sequence in sequences)


def is_prefilling(sequence: Sequence) -> bool:
    return not sequence.is_finished and sequence.num_computed < sequence.num_prompt


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_a_short_prompt_is_computed_in_the_step_after_it_came(num_ahead: int) -> None:
    harness = long_harness(max_num_seqs=8)
    ahead = [harness.add(400 - i, first_token=1000 * (i + 1)) for i in range(num_ahead)]
    harness.run_for(5)
    short = harness.add(6, first_token=9000)
    assert tokens_of(harness, *ahead, short)[-1] == 6
    harness.run()
    assert all(map(harness.is_full, harness.sequences))


def test_the_first_keeps_half_of_each_step_and_gets_what_others_leave() -> None:
    harness = long_harness()
    first = harness.add(300, first_token=1000)
    harness.step()
    second = harness.add(100, first_token=2000)
    assert tokens_of(harness, first, second) == (8, 8)
    third = harness.add(3, first_token=3000)
    assert tokens_of(harness, first, second, third) == (8, 5, 3)  # the shortest before those that are longer
    harness.run()


def test_what_the_first_does_not_need_is_for_others() -> None:
    harness = long_harness()
    first = harness.add(18, max_tokens=1, first_token=1000)
    second = harness.add(40, max_tokens=1, first_token=2000)
    assert tokens_of(harness, first, second) == (16, 0)
    assert tokens_of(harness, first, second) == (2, 14)


def test_a_longer_one_waits_for_its_turn() -> None:
    harness = long_harness()
    first, longer = harness.add(64, first_token=1000), harness.add(400, first_token=2000)
    for _ in range(4):
        assert tokens_of(harness, first, longer) == (16, 0)


def test_a_higher_priority_goes_before_what_runs_and_a_lower_one_gets_nothing() -> None:
    harness = long_harness()
    first = harness.add(300, first_token=1000)
    harness.step()
    urgent = harness.add(400, first_token=2000, priority=1)
    lower = harness.add(3, first_token=3000, priority=-1)
    for _ in range(3):
        assert tokens_of(harness, first, urgent, lower) == (0, 16, 0)


def test_what_a_running_prompt_is_about_to_compute_is_waited_for() -> None:
    """Two prompts have the same beginning, and the second is shorter: the beginning is computed once."""
    harness = long_harness()
    harness.add(20 * PAGE)
    harness.step()
    second = harness.add(19 * PAGE)
    parting = harness.add(6 * PAGE)  # all its pages are computed soon
    harness.run()
    assert (second.num_cached, parting.num_cached) == (19 * PAGE - PAGE, 6 * PAGE - PAGE)


def test_a_short_prompt_with_a_beginning_that_is_there_does_not_wait() -> None:
    harness = long_harness()
    first = harness.add(400)
    harness.run_for(3)
    short = harness.add(2 * PAGE)
    assert tokens_of(harness, first, short)[1] > 0
    assert short.num_cached == PAGE


@settings(max_examples=60, deadline=None)
@given(
    long=st.integers(100, 400),
    shorts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=30),
    num_seqs=st.sampled_from([2, 4, 16]),
)
def test_none_starves(long: int, shorts: list[tuple[int, int]], num_seqs: int) -> None:
    """However many come, the first is through in twice the steps that it takes alone, and all of them end."""
    harness = long_harness(max_num_seqs=num_seqs)
    first = harness.add(long, max_tokens=1, first_token=50_000)
    num_steps = 0
    for number, (pause, length) in enumerate(shorts):
        for _ in range(pause):
            harness.step()
            num_steps += is_prefilling(first)
        harness.add(length, max_tokens=1, first_token=1000 * number)
    while is_prefilling(first):
        harness.step()
        num_steps += is_prefilling(first)
    assert num_steps <= 2 * -(-long // BUDGET)
    harness.run()
    assert all(map(harness.is_full, harness.sequences))
