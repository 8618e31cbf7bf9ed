"""Sequences of a model with recurrent states: who holds a slot, what is found again, what runs out first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling import scheduler
from penstock.engine.scheduling.memory.state_pool import StatePool
from penstock.engine.scheduling.step_plan import StepPlan
from tests.engine.scheduling.scheduler_harness import PAGE, Harness
from tests.engine.scheduling.test_scheduler_drafts import RIGHT, WRONG, Scripted


def of_states(num_states: int = 9, **settings: object) -> Harness:
    return Harness(num_states=num_states, **settings)  # type: ignore[arg-type]


def test_a_sequence_goes_on_in_its_slot_and_gives_it_back() -> None:
    harness = of_states(prefix_caching=False)
    harness.add(6, max_tokens=5)
    slots = []
    while (plan := harness.step()) is not None:
        [row] = plan.rows
        slots += [slot for _, slot in row.states.writes]
    assert len(set(slots)) == 1
    harness.run()
    assert harness.pool.states.num_free == 8


def test_without_states_nothing_is_asked_for() -> None:
    harness = Harness()
    harness.add(6)
    plan = harness.step()
    assert plan is not None
    assert not plan.rows[0].states.writes
    assert not harness.scheduler.running[0].states.slots


def test_states_are_what_runs_out_first() -> None:
    harness = of_states(num_states=3, max_num_seqs=4)
    for first in range(4):
        harness.add(3, max_tokens=9, first_token=50 * first)
    harness.step()
    assert (len(harness.scheduler.running), len(harness.scheduler.waiting)) == (2, 2)
    harness.run()
    assert (len(harness.finished), harness.scheduler.num_preemptions) == (4, 0)


def test_a_prompt_goes_on_where_a_state_was_kept() -> None:
    """States are kept at each interval, and at the last page that a copy of the prompt can reuse."""
    harness = of_states(num_states=20, state_interval=3, max_batch_tokens=64)
    harness.add(21)  # five pages, of which the third has a state by the interval and the fifth by being the last
    harness.run()
    same = harness.add(21)
    longer = harness.add(40)
    harness.run()
    assert same.num_cached == 20
    assert longer.num_cached == 20
    shorter = harness.add(19)
    harness.run()
    assert shorter.num_cached == 12


@pytest.mark.parametrize("num_beside", [0, 3])
@pytest.mark.parametrize("chunk", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 13])
def test_each_end_of_a_page_has_its_state_however_a_prompt_is_cut(chunk: int, num_beside: int) -> None:
    """Prompts run alone, and beside decoding sequences that fill the batch."""
    harness = of_states(64, max_batch_tokens=chunk + num_beside)
    for number in range(num_beside):
        harness.add(1, max_tokens=40, first_token=100 * (number + 1))
        harness.run_for(2)
    prompt = harness.add(34)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    ends = range(PAGE, 34, PAGE)
    assert {prompt.page_hash(end // PAGE - 1, PAGE) for end in ends} <= harness.pool.states.indexed
    for end in ends:
        follower = harness.add(end + 1, max_tokens=1)
        harness.run()
        assert follower.num_cached == end


@pytest.mark.parametrize("chunk", [2, PAGE - 1, PAGE + 1])
def test_sequences_that_pass_pages_in_one_step_keep_a_state_each(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scheduler._chunk
    monkeypatch.setattr(scheduler, "_chunk", lambda *arguments: min(chunk, whole(*arguments)))
    harness = of_states(64, max_batch_tokens=4 * chunk)
    for number in range(4):
        harness.add(21, max_tokens=1, first_token=100 * number)
    harness.run()
    ends = range(PAGE, 21, PAGE)
    kept = {sequence.page_hash(end // PAGE - 1, PAGE) for sequence in harness.sequences for end in ends}
    assert kept <= harness.pool.states.indexed


def test_where_prompts_part_is_where_the_third_begins() -> None:
    """The second prompt finds pages without a state behind them, and leaves one there."""
    harness = of_states(state_interval=100, max_batch_tokens=64)
    shared = 16
    for number in range(3):
        harness.add(shared + 7)
        sequence = harness.sequences[-1]
        sequence.token_ids[shared:] = [100 * number + token for token in range(7)]
        harness.run()
    assert [sequence.num_cached for sequence in harness.sequences] == [0, 0, shared]


def test_a_state_goes_with_its_page() -> None:
    harness = of_states(num_pages=9, max_model_len=20)
    harness.add(12)
    harness.run()
    assert harness.pool.states.num_cached
    harness.add(17, max_tokens=2, first_token=100)
    harness.add(17, max_tokens=2, first_token=200)
    harness.run()
    assert len(harness.pool.states.indexed) <= harness.pool.num_cached


def test_a_kept_state_is_not_written_over_and_nobody_waits_for_one_to_be_kept() -> None:
    """With only the slots that sequences need, nothing is kept and all end."""
    scarce = of_states(num_states=2, max_num_seqs=1)
    scarce.add(9, max_tokens=12)
    scarce.run()
    scarce.add(9, max_tokens=2)
    scarce.run()
    assert len(scarce.finished) == 2
    plenty = of_states(num_states=9, max_num_seqs=1)
    first = plenty.add(9, max_tokens=12)
    plenty.run()
    plenty.add(9, max_tokens=20).token_ids[:] = first.token_ids[:18]
    plan = plenty.step()
    assert plan is not None
    assert plan.rows[0].start == 16  # where it had got to by decoding
    plenty.run()


@pytest.mark.parametrize("script", [RIGHT, WRONG], ids=["right", "wrong"])
def test_drafts_have_a_state_each_until_they_are_verified(script: list[int]) -> None:
    harness = of_states(max_rows=16, drafts=Scripted(script), num_states=4)
    sequence = harness.add(6, max_tokens=20)
    harness.step()
    plan = harness.step()
    assert plan is not None
    assert len(plan.rows[0].states.writes) == 1 + len(plan.rows[0].drafts) == 3  # and none was there for a third
    harness.run()
    assert harness.finished == [sequence]


def test_a_loop_of_steps_keeps_the_state_that_it_passes() -> None:
    harness = of_states(decode_steps=8, max_num_seqs=1)
    harness.add(5, max_tokens=17)
    plans: list[StepPlan] = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    assert [len(plan.rows[0].states.writes) for plan in plans if plan.num_steps == 8] == [2, 2]
    harness.run()


_NEWCOMERS = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(_NEWCOMERS, max_size=3), min_size=1, max_size=12),
    st.integers(2, 9),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([None, RIGHT, WRONG]),
    st.sets(st.integers(0, 30), max_size=4),
    st.sets(st.integers(0, 30), max_size=6),
)
def test_every_state_is_that_of_its_tokens(
    arrivals: list[list[tuple[int, int, int]]],
    num_states: int,
    interval: int,
    decode_steps: int,
    script: list[int] | None,
    failing: set[int],
    aborting: set[int],
) -> None:
    """The harness compares what each row reads with its sequence's tokens, whatever was shared, preempted or lost."""
    harness = of_states(
        num_states,
        num_pages=14,
        state_interval=interval,
        decode_steps=decode_steps,
        drafts=None if script is None else Scripted(script),
        max_rows=16,
    )
    steps = 0

    def fails(plan: StepPlan) -> bool:
        nonlocal steps
        steps += 1
        return steps in failing

    harness.fails = fails
    for number, newcomers in enumerate(arrivals):
        for num_prompt, max_tokens, kind in newcomers:
            harness.add(num_prompt, max_tokens, first_token=kind and 10 * kind)
        harness.step()
        if number in aborting and harness.scheduler.running:
            harness.finish(harness.scheduler.running[0])
    harness.run()
    assert len(harness.finished) == len(harness.sequences)
    states = harness.pool.states
    assert states.num_free + states.num_cached == num_states - 1
    assert harness.pool.num_available == 13


def _broken(spoil: Callable[[StatePool], None]) -> None:
    pool = StatePool(4)
    pool.index(pool.allocate(), b"a")
    pool.release(1)
    pool.allocate()
    pool.check()
    spoil(pool)
    pool.check()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._free.append(1), "each once"),
        (lambda pool: pool._key_of.clear(), "directions"),
        (lambda pool: pool.unindex(1) or pool._cached.update({1: None}) or pool._free.remove(1), "not indexed"),
        (lambda pool: pool._references.__setitem__(3, -1), "negative"),
    ],
)
def test_a_count_that_is_off_is_found(spoil: Callable[[StatePool], None], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _broken(spoil)


def test_more_slots_than_there_are_are_not_handed_out() -> None:
    pool = StatePool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="all 1 are held"):
        pool.allocate()
