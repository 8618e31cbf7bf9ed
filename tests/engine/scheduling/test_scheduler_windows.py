"""Layer groups with windows: pages are freed, found again, and never missed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.page_needs import PageNeeds
from tests.engine.scheduling.scheduler_harness import PAGE, Harness


def test_a_sequence_far_longer_than_the_pool_runs_if_all_layers_have_a_window() -> None:
    harness = Harness(num_pages=5, windows=(6,), max_model_len=500)
    sequence = harness.add(300, max_tokens=150)
    harness.run()
    assert len(sequence.token_ids) == 450
    assert harness.scheduler.num_preemptions == 0


def test_layers_with_a_window_leave_the_pool_to_those_without() -> None:
    harness = Harness(num_pages=1 + 20 + 2 * 3, windows=(None, 6, 6), max_model_len=500)
    assert harness.max_model_len == 20 * PAGE  # beside the three pages that six tokens may touch, in each group
    sequence = harness.add(50, max_tokens=100)
    harness.run()
    assert len(sequence.token_ids) == 80


def test_a_lone_prompt_is_cut_into_smaller_chunks_where_a_whole_one_finds_no_pages() -> None:
    harness = Harness(num_pages=4, windows=(PAGE,), max_batch_tokens=64, max_model_len=100)
    harness.add(40)
    plans = [harness.step() for _ in range(4)]
    assert [plan.num_tokens for plan in plans if plan] == [12, 8, 8, 8]
    harness.run()


def test_a_sequence_that_preempts_all_others_goes_on_in_what_they_leave() -> None:
    harness = Harness(num_pages=9, windows=(None, 3), max_batch_tokens=16, max_model_len=100)
    assert harness.max_model_len == 24
    first = harness.add(20, max_tokens=20)
    second = harness.add(4, max_tokens=20, first_token=100)
    harness.run()
    assert [len(sequence.token_ids) for sequence in (first, second)] == [24, 24]


def test_a_prompt_is_found_again_by_its_last_window_alone() -> None:
    harness = Harness(num_pages=12, windows=(6,), max_model_len=100)
    harness.add(40)
    harness.run()
    again = harness.add(40)
    plan = harness.step()
    assert plan is not None
    assert (again.num_cached, plan.num_tokens) == (36, 4)
    assert list(again.pages.groups[0][:7]) == [0] * 7
    harness.run()


def test_a_window_that_was_evicted_costs_the_whole_prefix_of_its_group() -> None:
    harness = Harness(num_pages=16, windows=(6,), max_model_len=100)
    harness.add(40, max_tokens=1)
    harness.run()
    harness.add(60, max_tokens=1, first_token=100)
    harness.run()
    again = harness.add(40)
    harness.run()
    assert again.num_cached == 0


def test_several_steps_in_one_dispatch_give_pages_back_too() -> None:
    harness = Harness(num_pages=8, windows=(3,), max_model_len=200, decode_steps=8)
    sequence = harness.add(5, max_tokens=150)
    longest = 0
    while harness.step() is not None:
        longest = max(longest, harness.in_flight.num_steps if harness.in_flight else 0)
    assert (len(sequence.token_ids), longest) == (155, 8)


def test_pages_that_windows_passed_are_found_though_their_prompt_still_runs() -> None:
    harness = Harness(num_pages=40, windows=(None, 4), max_batch_tokens=8, max_model_len=100)
    first = harness.add(24, max_tokens=60)
    for _ in range(6):
        harness.step()
    second = harness.add(24, max_tokens=2)
    harness.step()
    assert second.num_cached == 20
    assert second.pages.groups[0][:5] == first.pages.groups[0][:5]
    harness.run()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_what_a_sequence_holds_at_most_is_what_it_needs(window: int) -> None:
    """The pages with a token that some token of a chunk sees are counted, and compared with the formula."""
    needs = PageNeeds(PAGE, (window,))
    for chunk in (1, 3, 4, 7):
        for end in (1, 4, 17, 40):
            starts = range(max(1, end - chunk + 1))
            spans = ((max(0, start - window + 1), min(end, start + chunk)) for start in starts)
            counted = max((last - 1) // PAGE - first // PAGE + 1 for first, last in spans)
            assert counted <= needs.most(end, chunk) <= counted + (end < 40)  # a bound where few chunks are counted


def test_the_longest_sequence_is_what_fits_without_windows_and_what_is_asked_for_with_them() -> None:
    assert PageNeeds(PAGE).longest(Amount.of(10), 100) == 40
    assert PageNeeds(PAGE).longest(Amount.of(10), 30) == 30
    assert PageNeeds(PAGE, (None, None), (0, 0)).longest(Amount.of(11), 100) == 20
    assert PageNeeds(PAGE, (5,)).longest(Amount.of(2), 1000) == 1000  # five tokens touch two pages at most, six three
    assert PageNeeds(PAGE, (6,)).longest(Amount.of(2), 1000) == 8
    of_two = PageNeeds(PAGE, (None, 6), (0, 1))
    assert of_two.longest(Amount.of(10, 3), 100) == 40
    assert of_two.longest(Amount.of(10, 2), 100) == 8  # the kind that is short of pages decides


def test_pages_are_needed_by_kind() -> None:
    needs = PageNeeds(PAGE, (None, 6, 6), (0, 1, 1))
    assert needs.held(100, 1) == Amount.of(25, 6)
    assert needs.bounded_kinds == {1}
    assert needs.spans(Amount.of(10, 4)) == 10  # the other kind's come free
    assert needs.sequences(Amount.of(100, 12), 100) == 2


MAX_NUM_SEQS = 4
WINDOWS = st.lists(st.sampled_from([None, 1, 2, 4, 5, 7, 12]), min_size=1, max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    load=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=8),
    windows=WINDOWS,
    num_kinds=st.integers(1, 3),
    num_pages=st.tuples(*[st.integers(10, 40)] * 3),
    budget=st.sampled_from([4, 8, 16]),
    decode_steps=st.sampled_from([1, 1, 3]),
    data=st.data(),
)
def test_every_token_sees_all_of_its_window_and_everything_finishes(
    load: list[tuple[int, int, int]],
    windows: tuple[int | None, ...],
    num_kinds: int,
    num_pages: tuple[int, ...],
    budget: int,
    decode_steps: int,
    data: st.DataObject,
) -> None:
    kinds = tuple(group % num_kinds for group in range(len(windows)))
    num_pages = num_pages[: max(kinds) + 1]
    harness = Harness(
        num_pages=num_pages,
        max_batch_tokens=budget,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=90,
        windows=windows,
        kinds=kinds,
        decode_steps=decode_steps,
    )
    drawn = data.draw(st.lists(st.booleans(), max_size=3))
    failures = iter(drawn)
    harness.fails = lambda plan: len(plan.rows) > 1 and next(failures, False)
    for num_prompt, max_tokens, family in load:
        harness.add(min(num_prompt, harness.max_model_len - 1), max_tokens, first_token=100 * family)
        for _ in range(data.draw(st.integers(0, 6))):
            harness.step()
            check_that_no_more_is_held_than_needed(harness, decode_steps)
    harness.run()
    assert all(harness.is_full(sequence) for sequence in harness.sequences)
    assert harness.pool.available == Amount(tuple(count - 1 for count in num_pages))
    assert harness.scheduler.num_preemptions <= 2 + harness.num_generated / 2 + MAX_NUM_SEQS * sum(drawn)


def check_that_no_more_is_held_than_needed(harness: Harness, decode_steps: int) -> None:
    for sequence in harness.scheduler.running:
        needs = harness.pool.needs
        most = needs.held(harness.max_model_len, max(harness.max_batch_tokens, decode_steps))
        assert needs.by_kind(sequence.pages.num_held).fits(most)
