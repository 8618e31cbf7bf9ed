"""The scheduler, driven without a device."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.scheduler_harness import PAGE, Harness


def test_decoding_is_never_held_up_by_a_long_prompt() -> None:
    harness = Harness(max_batch_tokens=16)
    short = harness.add(3, max_tokens=20)
    harness.step()
    harness.add(40, max_tokens=2, first_token=100)
    for _ in range(4):
        plan = harness.step()
        assert plan is not None
        assert short in {row.sequence for row in plan.rows}
        assert plan.num_tokens <= 16


def test_prompts_are_cut_into_chunks_that_fill_the_budget() -> None:
    harness = Harness(max_batch_tokens=16)
    harness.add(40)
    plans = [harness.step() for _ in range(3)]
    assert [plan.num_tokens for plan in plans if plan] == [16, 16, 8]
    assert [bool(plan.sampled) for plan in plans if plan] == [False, False, True]


def test_higher_priority_then_earlier_arrival_runs_first() -> None:
    harness = Harness(max_num_seqs=1)
    first, second = harness.add(4), harness.add(4, first_token=50)
    urgent = harness.add(4, priority=5, first_token=90)
    harness.run()
    assert harness.finished == [urgent, first, second]


def test_out_of_pages_preempts_the_lowest_priority_newest() -> None:
    harness = Harness(num_pages=25, max_model_len=80)
    old = harness.add(4, max_tokens=60)
    low = harness.add(4, max_tokens=60, priority=-1, first_token=40)
    new = harness.add(4, max_tokens=60, first_token=80)
    for _ in range(60):
        harness.step()
        if harness.scheduler.num_preemptions:
            break
    assert harness.scheduler.waiting == (low,)
    harness.run()
    assert harness.finished == [old, new, low]
    assert [len(s.token_ids) for s in (old, low, new)] == [64, 64, 64]


def test_a_sole_sequence_can_fill_the_whole_pool() -> None:
    harness = Harness(num_pages=6, max_model_len=48)
    sequence = harness.add(19, max_tokens=100)
    harness.run()
    assert len(sequence.token_ids) == 20 == harness.max_model_len


def test_a_prefix_is_taken_from_the_cache_and_the_last_token_still_computed() -> None:
    harness = Harness(max_batch_tokens=32)
    harness.add(16)
    harness.run()
    scheduler = harness.scheduler
    before = scheduler.num_queried_tokens, scheduler.num_found_tokens
    again = harness.add(16)
    plan = harness.step()
    assert plan is not None
    assert (again.num_cached, plan.num_tokens) == (12, 4)
    assert (before, scheduler.num_queried_tokens, scheduler.num_found_tokens) == ((16, 0), 32, 12)


def test_a_finished_sequence_takes_no_token_from_a_step_in_flight() -> None:
    harness = Harness()
    sequence = harness.add(4, max_tokens=10)
    harness.step()
    harness.step()
    harness.scheduler.finish(sequence)
    length = len(sequence.token_ids)
    assert harness.step() is None
    assert len(sequence.token_ids) == length
    assert harness.pool.num_available == 63


def test_a_sequence_preempted_in_flight_keeps_the_token_that_comes_late() -> None:
    harness = Harness()
    sequence = harness.add(4, max_tokens=10)
    harness.step()
    harness.scheduler._preempt(sequence)
    assert sequence.num_in_flight == 1
    harness.step()  # the token is unknown when this is planned: the sequence cannot start yet
    assert sequence.token_ids[-1] == 7
    assert sequence.num_in_flight == 0
    harness.run()
    assert len(sequence.token_ids) == 14


def test_the_last_allowed_token_in_flight_is_not_followed_by_a_wasted_row() -> None:
    harness = Harness()
    harness.add(4, max_tokens=1)
    assert harness.step() is not None
    assert harness.step() is None


def test_the_sequence_that_fails_alone_is_given_up_and_its_neighbours_finish() -> None:
    harness = Harness()
    good = [harness.add(5, first_token=20 * i) for i in range(2)]
    poison = harness.add(5, first_token=60)
    good.append(harness.add(5, first_token=80))
    harness.fails = lambda plan: poison in {row.sequence for row in plan.rows}
    harness.run()
    assert len(poison.token_ids) == 5
    assert [len(sequence.token_ids) for sequence in good] == [9, 9, 9]


def test_a_passing_failure_costs_nobody_a_token() -> None:
    harness = Harness()
    sequences = [harness.add(5, first_token=20 * i) for i in range(4)]
    failures = iter([False, True])
    harness.fails = lambda plan: next(failures, False)
    harness.run()
    assert [len(sequence.token_ids) for sequence in sequences] == [9] * 4


def test_a_prompt_that_is_scored_takes_a_row_for_each_token_of_those_that_are_free() -> None:
    harness = Harness(max_batch_tokens=64, max_rows=8)
    scored = harness.add(20, prompt_logprobs=0)
    plans = [harness.step() for _ in range(3)]
    assert [(plan.rows[0].num_tokens, plan.rows[0].num_scored) for plan in plans if plan] == [(8, 8), (8, 8), (4, 3)]
    harness.step()
    assert (scored.num_unscored, len(scored.token_ids)) == (0, 21)


def test_rows_are_kept_for_all_that_may_sample_beside_a_prompt_that_is_scored() -> None:
    harness = Harness(max_batch_tokens=64, max_rows=8)
    others = [harness.add(3, max_tokens=20, first_token=100 * i) for i in range(1, 3)]
    harness.step()
    scored = harness.add(20, prompt_logprobs=0)
    third = harness.add(3, first_token=300)
    plan = harness.step()
    assert plan is not None
    assert {row.sequence: row.num_tokens for row in plan.rows} == {others[0]: 1, others[1]: 1, scored: 6}
    assert third.batch_slot == -1  # no row was left for it
    plan = harness.step()
    assert plan is not None
    assert {row.sequence: row.num_tokens for row in plan.rows} == {others[0]: 1, others[1]: 1, third: 3, scored: 5}
    harness.run()
    assert len(third.token_ids) == 7


def test_a_prompt_that_is_scored_takes_from_the_cache_only_what_it_scored_before() -> None:
    harness = Harness(max_rows=8)
    harness.add(24)
    harness.run()
    scored = harness.add(24, prompt_logprobs=0)

    def chunk() -> tuple[int, int, int]:
        plan = harness.step()
        assert plan is not None
        return plan.rows[0].start, plan.rows[0].num_tokens, plan.rows[0].num_scored

    assert [chunk(), chunk()] == [(0, 8, 8), (8, 8, 8)]
    harness.scheduler._preempt(scored)  # with the second of these chunks in flight
    assert [chunk(), chunk()] == [(8, 8, 8), (16, 8, 7)]
    harness.scheduler._preempt(scored)
    assert harness.step() is None  # waits for the token in flight
    assert scored.num_unscored == 0
    assert chunk() == (24, 1, 0)


Load = list[tuple[int, int, int, int, int | None]]

LOADS = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.integers(1, 20),
        st.integers(-1, 1),
        st.integers(0, 1),
        st.sampled_from([None, None, 0]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    load=LOADS,
    num_pages=st.integers(9, 24),
    budget=st.sampled_from([4, 8, 16]),
    max_rows=st.sampled_from([4, 5, 16]),
    data=st.data(),
)
def test_everything_finishes_whatever_is_submitted_and_cancelled(
    load: Load, num_pages: int, budget: int, max_rows: int, data: st.DataObject
) -> None:
    harness = Harness(
        num_pages=num_pages,
        max_batch_tokens=budget,
        max_num_seqs=4,
        max_model_len=(num_pages - 1) * PAGE,
        max_rows=max_rows,
    )
    cancelled: set[Sequence] = set()
    for num_prompt, max_tokens, priority, family, prompt_logprobs in load:
        harness.add(
            min(num_prompt, harness.max_model_len - 1),
            max_tokens,
            priority=priority,
            first_token=100 * family,
            prompt_logprobs=prompt_logprobs,
        )
        for _ in range(data.draw(st.integers(0, 4))):
            harness.step()
        unfinished = [s for s in harness.sequences if not s.is_finished]
        if unfinished and data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(unfinished))
            harness.scheduler.finish(victim)
            cancelled.add(victim)
    harness.run()
    for sequence in set(harness.sequences) - cancelled:
        assert harness.is_full(sequence)
        assert sequence.num_unscored == 0
        assert sequence.token_ids[: sequence.num_prompt] == list(sequence.request.prompt_token_ids)
    assert harness.pool.num_available == num_pages - 1
    # No thrash: a preempted sequence returns only when the others could grow by several pages each.
    assert harness.scheduler.num_preemptions <= 1 + harness.num_generated / 2


@settings(max_examples=50, deadline=None)
@given(num_seqs=st.integers(2, 12), max_tokens=st.integers(40, 90))
def test_preemptions_per_generated_token_are_few_in_a_pool_far_too_small(num_seqs: int, max_tokens: int) -> None:
    harness = Harness(num_pages=33, max_num_seqs=12, max_model_len=128)
    for i in range(num_seqs):
        harness.add(8, max_tokens, first_token=1000 * i)
    harness.run(limit=20_000)
    assert harness.scheduler.num_preemptions <= harness.num_generated / PAGE


@settings(max_examples=50, deadline=None)
@given(load=LOADS)
def test_no_sequence_starves_while_newer_ones_keep_coming(load: Load) -> None:
    harness = Harness(num_pages=16, max_num_seqs=2, max_model_len=60)
    first = harness.add(30, 20)
    for i in range(200):
        num_prompt, max_tokens, *_ = load[i % len(load)]
        harness.add(num_prompt, max_tokens, first_token=100 * i)
        harness.step()
        if first.is_finished:
            return
    raise AssertionError("the first sequence still waits after 200 newer ones came")
