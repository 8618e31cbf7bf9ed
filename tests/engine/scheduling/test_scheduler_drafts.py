"""Steps with drafts: what they hold and compute, whichever drafter made them."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.scheduler_harness import PAGE, TOKEN, Harness


class Scripted:
    """Proposes one list after the other to each sequence, cut to what fits."""

    def __init__(self, *lists: list[int]) -> None:
        self.lists = lists
        self.count = 0

    def propose(self, sequences: Collection[Sequence], pace: Pace, room: int) -> dict[Sequence, tuple[int, ...]]:
        found = {}
        for sequence in sequences:
            self.count += 1
            found[sequence] = tuple(self.lists[self.count % len(self.lists)][:room])
            room -= len(found[sequence])
        return found


RIGHT, WRONG = [TOKEN] * 3, [TOKEN, 99, TOKEN]


def test_drafts_are_rows_of_the_step_and_count_once_they_are_right() -> None:
    harness = Harness(max_rows=16, drafts=Scripted(WRONG))
    sequence = harness.add(6, max_tokens=20)
    harness.step()
    assert (sequence.num_computed, len(sequence.token_ids), sequence.num_in_flight) == (6, 6, 1)
    plan = harness.step()
    assert plan is not None
    [row] = plan.rows
    assert (row.start, row.num_tokens, row.num_known, row.num_drawn, row.drafts) == (6, 4, 1, 4, tuple(WRONG))
    assert (sequence.num_computed, len(sequence.token_ids), sequence.num_in_flight) == (7, 7, 1)
    assert sequence.pages.num_places * PAGE >= 10
    harness.step()
    assert len(sequence.token_ids) == 9  # what was drawn behind the last token, and behind the draft that was right
    assert sequence.num_computed == 9  # the step that is on its way computes the newest of them


def test_there_are_no_drafts_beside_prompts_nor_behind_the_last_token_that_is_allowed() -> None:
    harness = Harness(max_rows=16, drafts=Scripted(RIGHT))
    first = harness.add(4, max_tokens=6)
    harness.step()
    harness.add(40, max_tokens=1, first_token=50)
    plans = [harness.step(), harness.step(), harness.step()]
    assert not any(plan.has_drafts for plan in plans if plan)  # the prompt takes three steps beside the other's tokens
    plan = harness.step()
    assert plan is not None
    assert {row.sequence: len(row.drafts) for row in plan.rows} == {first: 1}
    harness.run()
    assert len(first.token_ids) == 10


def test_drafts_take_no_more_rows_than_there_are_and_nobody_elses_pages() -> None:
    harness = Harness(max_rows=6, drafts=Scripted(RIGHT))
    for first_token in (0, 50):
        harness.add(4, max_tokens=30, first_token=first_token)
    harness.step()
    plan = harness.step()
    assert plan is not None
    assert [len(row.drafts) for row in plan.rows] == [3, 1]
    crowded = Harness(num_pages=3, max_model_len=8, max_rows=16, drafts=Scripted(RIGHT))
    crowded.add(7, max_tokens=1)
    crowded.run()
    lone = crowded.add(5, max_tokens=3, first_token=30)
    crowded.step()
    plan = crowded.step()
    assert plan is not None
    assert len(plan.rows[0].drafts) == 1  # the third token may be drawn, the fourth may not
    crowded.run()
    assert len(lone.token_ids) == 8
    assert crowded.scheduler.num_preemptions == 0


def test_a_sequence_preempted_in_flight_keeps_its_right_drafts_and_computes_them_again() -> None:
    harness = Harness(max_rows=16, drafts=Scripted(RIGHT))
    sequence = harness.add(4, max_tokens=20)
    harness.run_for(2)
    assert harness.in_flight is not None
    assert harness.in_flight.has_drafts
    harness.scheduler._preempt(sequence)
    harness.settle(harness.in_flight, None)
    assert (len(sequence.token_ids), sequence.num_computed) == (9, 0)


@settings(max_examples=200, deadline=None)
@given(
    load=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=8),
    windows=st.lists(st.sampled_from([None, 1, 4, 5, 12]), min_size=1, max_size=3).map(tuple),
    num_pages=st.integers(10, 40),
    max_rows=st.sampled_from([4, 7, 16]),
    drafts=st.lists(st.lists(st.sampled_from([TOKEN, TOKEN, 99]), max_size=9), min_size=1, max_size=4),
    data=st.data(),
)
def test_everything_finishes_and_sees_its_own_pages_whatever_is_drafted(
    load: list[tuple[int, int, int]],
    windows: tuple[int | None, ...],
    num_pages: int,
    max_rows: int,
    drafts: list[list[int]],
    data: st.DataObject,
) -> None:
    harness = Harness(
        num_pages=num_pages, max_model_len=90, windows=windows, max_rows=max_rows, drafts=Scripted(*drafts)
    )
    failures = iter(data.draw(st.lists(st.booleans(), max_size=3)))
    harness.fails = lambda plan: len(plan.rows) > 1 and next(failures, False)
    for num_prompt, max_tokens, family in load:
        harness.add(min(num_prompt, harness.max_model_len - 1), max_tokens, first_token=100 * family)
        for _ in range(data.draw(st.integers(0, 6))):
            harness.step()
            if harness.scheduler.running and data.draw(st.integers(0, 9)) == 0:
                harness.scheduler._preempt(harness.scheduler.running[-1])  # with drafts in flight
    harness.run()
    assert all(harness.is_full(sequence) for sequence in harness.sequences)
    assert harness.pool.num_available == num_pages - 1
