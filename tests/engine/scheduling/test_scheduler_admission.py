"""While a prompt waits for pages, small ones behind it start, up to a bound."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.engine.scheduling.admission as admission_module
import penstock.engine.scheduling.sequence as sequence_module
from penstock.engine.scheduling.admission import PASSING
from penstock.engine.scheduling.memory.lookup import Lookup
from penstock.engine.scheduling.memory.page_pool import page_hash
from penstock.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.scheduler_harness import PAGE, Harness


def crowded() -> tuple[Harness, Sequence, Sequence]:
    """32 pages: a long-running sequence has, and will have, 20 of them; the prompt behind it waits for 15."""
    harness = Harness(num_pages=33, max_batch_tokens=64, max_model_len=128)
    long = harness.add(60, max_tokens=20)
    harness.step()
    return harness, long, harness.add(60, max_tokens=2, first_token=200)


def steps_until(harness: Harness, sequence: Sequence, limit: int = 500) -> int:
    """Returns the number of steps until `sequence` has started."""
    for count in range(limit):
        if sequence.num_starts:
            return count
        harness.step()
    raise AssertionError(f"not started after {limit} steps: {harness.scheduler.running} {harness.scheduler.waiting}")


def test_small_prompts_go_on_behind_a_huge_one_that_finds_no_pages() -> None:
    harness, long, huge = crowded()
    small = [harness.add(4, max_tokens=2, first_token=500 + 10 * i) for i in range(3)]
    harness.run()
    assert harness.finished == [*small, long, huge]


def test_what_passes_takes_no_more_pages_than_what_is_passed_and_the_rest_waits_behind_it() -> None:
    harness, long, huge = crowded()
    for i in range(40):
        harness.add(4, max_tokens=2, first_token=500 + 10 * i)  # two pages each
    harness.run_for(15)
    assert huge.num_passed_pages.total == PASSING * 16  # for its 60 tokens and one more
    assert harness.scheduler.running == (long,)
    steps_until(harness, huge)
    assert long.is_finished
    assert huge.num_passed_pages.total == PASSING * 16
    harness.run()
    assert all(harness.is_full(sequence) for sequence in harness.sequences)


def test_what_has_a_higher_priority_starts_first_and_passes_nobody() -> None:
    harness, _, huge = crowded()
    urgent = harness.add(4, max_tokens=2, first_token=500, priority=1)
    harness.step()
    assert (urgent.num_starts, huge.num_passed_pages.total) == (1, 0)


def test_a_lower_priority_passes_within_the_same_bound() -> None:
    harness = Harness(num_pages=33, max_batch_tokens=64, max_model_len=128)
    harness.add(60, max_tokens=20)
    harness.step()
    urgent = harness.add(60, max_tokens=2, first_token=200, priority=1)
    for i in range(300):
        harness.add(4, max_tokens=2, first_token=500 + 10 * i, priority=-1)
        harness.step()
        if urgent.is_finished:
            break
    assert urgent.is_finished
    assert urgent.num_passed_pages.total <= PASSING * 16


def test_a_preempted_sequence_is_passed_no_more_often_than_one_that_never_ran() -> None:
    harness, _, huge = crowded()
    for i in range(40):
        harness.add(4, max_tokens=2, first_token=500 + 10 * i)
    steps_until(harness, huge)
    passed = huge.num_passed_pages.total
    assert passed
    harness.scheduler._preempt(huge)
    harness.run()
    assert passed <= huge.num_passed_pages.total <= PASSING * 16


def test_a_suspect_that_finds_no_pages_is_not_passed_for_good() -> None:
    """A suspect runs alone or not at all, so whatever else starts meanwhile starts before it."""
    harness = Harness(num_pages=33, max_num_seqs=8, max_batch_tokens=64, max_model_len=128)
    first, second = harness.add(30, max_tokens=60), harness.add(50, max_tokens=30, first_token=200)
    harness.run_for(16)
    failures = iter([True])
    harness.fails = lambda plan: next(failures, False)
    for i in range(300):  # more than finish, so that some always wait
        harness.add(12, max_tokens=8, first_token=500 + 20 * i)
        harness.step()
        if i == 20:
            assert second.is_suspect
            assert not first.is_suspect
        if second.is_finished:
            break
    assert second.is_finished
    assert 0 < second.num_passed_pages.total <= PASSING * harness.pool.needs.pages_for(second.num_tokens)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    pages: list[tuple[int, ...]] = []

    def hash_of(parent: bytes, token_ids: list[int]) -> bytes:
        pages.append(tuple(token_ids))
        return page_hash(parent, token_ids)

    monkeypatch.setattr(sequence_module, "page_hash", hash_of)
    return pages


def test_pages_of_a_waiting_prompt_are_hashed_once_and_looked_up_when_that_may_change_something(
    hashed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(num_pages=29, max_batch_tokens=64, max_model_len=128)
    running = harness.add(60, max_tokens=40)
    harness.run_for(3)
    waiting = harness.add(90)  # the first 60 tokens are the same
    lookups: list[Sequence] = []
    look_up = harness.scheduler._pages.look_up

    def counted(sequence: Sequence) -> Lookup:
        lookups.append(sequence)
        return look_up(sequence)

    monkeypatch.setattr(harness.scheduler._pages, "look_up", counted)
    harness.run_for(35)  # in which the other one indexes pages and takes new ones
    assert (waiting.num_starts, lookups) == (0, [waiting])
    harness.run()
    assert (waiting.num_cached, lookups) == (60, [waiting, waiting])
    assert len(hashed) == len(running.page_hashes) + len(waiting.page_hashes)


def test_a_burst_of_prompts_that_do_not_fit_is_hashed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "HASHED_PAGES", 20)
    harness = Harness(num_pages=29, max_batch_tokens=64, max_model_len=128)
    harness.add(60, max_tokens=40)
    harness.run_for(3)
    huge = [harness.add(90) for _ in range(4)]
    small = harness.add(4, first_token=500)
    harness.step()
    assert [len(sequence.page_hashes) for sequence in huge] == [16, 16, 0, 0]  # 15 are cached, and the next is not
    harness.step()
    assert [len(sequence.page_hashes) for sequence in huge] == [16] * 4
    assert not small.num_starts
    harness.step()
    assert small.num_starts


def test_of_a_preempted_sequence_only_the_pages_it_grew_by_are_hashed(hashed: list[tuple[int, ...]]) -> None:
    harness = Harness(max_model_len=100)
    sequence = harness.add(20, max_tokens=40)
    for _ in range(3):
        harness.run_for(8)
        harness.scheduler._preempt(sequence)
    harness.run()
    assert len(hashed) == len(sequence.page_hashes) <= len(sequence.token_ids) // PAGE
    assert len(sequence.token_ids) == 60


Arrival = tuple[int, int, int, int]  # tokens of the prompt, max_tokens, priority, which of several prefixes

ARRIVALS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 6), st.integers(25, 60)),
        st.integers(1, 12),
        st.sampled_from([0, 0, 0, 1, -1]),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    num_pages=st.integers(14, 30),
    budget=st.sampled_from([8, 16, 64]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    windows=st.sampled_from([(None,), (None,), (None, 6), (6,), (None, None)]),
    num_kinds=st.integers(1, 2),
    data=st.data(),
)
def test_small_and_huge_prompts_all_finish_and_none_is_passed_more_often_than_is_allowed(
    arrivals: list[Arrival],
    num_pages: int,
    budget: int,
    max_num_seqs: int,
    windows: tuple[int | None, ...],
    num_kinds: int,
    data: st.DataObject,
) -> None:
    kinds = tuple(group % num_kinds for group in range(len(windows)))
    harness = Harness(
        num_pages=(num_pages, num_pages // 2 + 3)[: max(kinds) + 1],
        kinds=kinds,
        max_batch_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=(num_pages - 1) * PAGE,
        windows=windows,
    )
    passes: Counter[Sequence] = Counter()
    for num_prompt, max_tokens, priority, family in arrivals:
        harness.add(
            min(num_prompt, harness.max_model_len - 1), max_tokens, priority=priority, first_token=1000 * family
        )
        for _ in range(data.draw(st.integers(0, 3))):
            step_and_check(harness, passes)
    for _ in range(3000):
        if not (harness.scheduler.running or harness.scheduler.waiting):
            break
        step_and_check(harness, passes)
    assert all(harness.is_full(sequence) for sequence in harness.sequences)
    assert harness.pool.num_available == harness.pool.num_pages - len(harness.pool.stores)
    assert harness.scheduler.num_preemptions <= 1 + harness.num_generated / 2


def step_and_check(harness: Harness, passes: Counter[Sequence]) -> None:
    starts = {sequence: sequence.num_starts for sequence in harness.sequences}
    check_that_lookups_are_bounds(harness)
    harness.step()
    started = [sequence for sequence, before in starts.items() if sequence.num_starts > before]
    for waiting in harness.scheduler.waiting:
        passes[waiting] += sum(waiting.rank < sequence.rank for sequence in started)
        # Each start takes a page at least: those of its tokens and of one more bound the starts too.
        pages = harness.pool.needs.most(waiting.num_tokens + 1, harness.max_batch_tokens)
        assert passes[waiting] <= min(waiting.num_passed_pages.total, PASSING * pages)
        if len(harness.pool.stores) == 1:  # otherwise there may be plenty of the other kinds
            assert waiting.num_passed_pages.total <= PASSING * pages


def check_that_lookups_are_bounds(harness: Harness) -> None:
    pages = harness.scheduler._pages
    for sequence in harness.scheduler.waiting:
        remembered, least = sequence.lookup, pages.least_to_admit(sequence)
        if least is not None:
            assert least.fits(pages.look_up(sequence).num_pages)
        sequence.lookup = remembered
