"""Choice of a drafter by how good it is, and when drafting pays; on the host alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.slack import StepClock
from penstock.engine.scheduling.step_plan import StepPlan, row_of
from penstock.engine.speculation.acceptance import Acceptance, count_right
from penstock.engine.speculation.ngrams import MAX_PLACES, NGRAM, NgramDrafter, NgramIndex
from penstock.engine.speculation.speculation import Speculation
from tests.engine.speculation.drafters import Says

FREE = Pace(StepTimes(prompt_s={16: 0.05}, decode_s={16: 0.05}))  # 16 rows take what one takes
DEAR = Pace(StepTimes(prompt_s={16: 0.05}, decode_s={count: 0.05 * count for count in range(1, 17)}))


def sequence_of(*prompt: int, max_tokens: int = 50, **params: object) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Sequence(Request("r", prompt, sampling), 0, 0)


def speculation_of(*says: int, max_tokens: int = 4) -> Speculation:
    drafter = Says(lambda sequence: says)
    return Speculation(
        drafter,
        lambda sequence, draft: draft,
        max_tokens=max_tokens,
        max_rows=16,
        vocab_size=100,
        eos_token_ids=(9,),
        clock=StepClock(),
    )


TOKENS = st.lists(st.integers(0, 3), max_size=80)


@settings(max_examples=200)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 80), max_size=5))
def test_what_is_looked_up_came_before(tokens: list[int], cuts: list[int]) -> None:
    index = NgramIndex(100)
    for end in sorted({min(cut, len(tokens)) for cut in (*cuts, 80)}):
        known = tokens[:end]
        index.follow(known)
        guess = index.guess(known, 5)
        places = [i for i in range(NGRAM, end) if known[i - NGRAM : i] == known[end - NGRAM : end]]
        if guess and index.num_agreeing < NGRAM:  # behind a token that was exchanged
            assert any(all(guess[j] == (known + list(guess))[i + j] for j in range(5)) for i in range(NGRAM, end))
        elif guess:
            assert any(all(guess[j] == (known + list(guess))[i + j] for j in range(5)) for i in places)
        else:  # the newest place is always known, unless another n-gram has its place in the table
            assert len(places) < 3


def test_a_place_is_followed_as_long_as_tokens_agree() -> None:
    drafter = NgramDrafter()
    sequence = sequence_of(*range(10, 30), 5, 12, 13, 14)
    assert drafter.draft(sequence, 3) == ((15, 16, 17), 2)
    sequence.token_ids += [15, 16, 17]
    assert drafter.draft(sequence, 2) == ((18, 19), 3)  # six agree by now
    sequence.token_ids.append(40)
    assert drafter.draft(sequence, 2) == ((19, 20), 0)  # 18 was exchanged
    sequence.token_ids.append(19)
    assert drafter.draft(sequence, 2) == ((20, 21), 1)
    sequence.token_ids.append(41)
    assert drafter.draft(sequence, 2).token_ids == ()  # and here something else begins
    drafter.forget(sequence)
    assert not drafter._indexes


def test_what_repeats_at_once_is_drafted_over_and_over() -> None:
    assert NgramDrafter().draft(sequence_of(1, 2, 1, 2, 1, 2), 5).token_ids == (1, 2, 1, 2, 1)


def test_the_table_is_bounded_and_of_a_long_prompt_reads_the_end() -> None:
    index = NgramIndex(10**9)
    assert len(index._table) == MAX_PLACES
    tokens = [*range(5, 9), *range(100, 100 + 2 * MAX_PLACES), 5, 6, 7]
    index.follow(tokens)
    assert index.guess(tokens, 1) == ()
    tokens += [2 * MAX_PLACES, 2 * MAX_PLACES + 1, 2 * MAX_PLACES + 2]
    index.follow(tokens)
    assert index.guess(tokens, 1) == (2 * MAX_PLACES + 3,)


def test_acceptance_is_what_was_seen_and_before_that_what_is_known_of_others() -> None:
    everyone = Acceptance()
    assert everyone.chance == 0.5
    one = Acceptance(everyone)
    for _ in range(20):
        one.note(0, 1)
    assert one.chance < 0.1
    assert Acceptance(everyone).chance == pytest.approx(everyone.chance)
    assert everyone.chance < 0.1
    for _ in range(20):
        one.note(4, 4)
    assert one.chance > 0.9
    assert count_right((1, 2, 3), (1, 2)) == 2
    assert count_right((1, 2, 3), (1, 3, 3)) == 1


def test_so_many_are_verified_as_make_most_tokens_per_second() -> None:
    half = [0.5**number for number in range(1, 9)]
    assert FREE.num_drafts(1, 0, half, host_s=0.0) == 8
    assert DEAR.num_drafts(1, 0, half, host_s=0.0) == 0
    mild = StepTimes(prompt_s={16: 0.05}, decode_s={count: 0.05 + 0.01 * count for count in range(1, 17)})
    assert Pace(mild).num_drafts(1, 0, half, host_s=0.0) == 2  # 1.75 tokens in 80 ms, 1.875 in 90
    assert Pace(mild).num_drafts(1, 0, [0.9**number for number in range(1, 9)], host_s=0.0) == 7
    assert Pace(mild).num_drafts(1, 0, [0.03], host_s=0.0) == 0
    few = StepTimes(prompt_s={16: 0.5}, decode_s={16: 0.5}, few_s={1: 0.05, 4: 0.06})
    assert Pace(few).num_drafts(1, 0, half, host_s=0.0) == 3  # 16 take ten times what one does: padding is skipped
    assert [few.sampled_s(count, 0) for count in (1, 4, 10, 16)] == pytest.approx([0.05, 0.06, 0.28, 0.5])
    quick = StepTimes(prompt_s={16: 0.005}, decode_s={16: 0.005}, few_s={1: 0.003, 4: 0.003})
    assert Pace(quick).num_drafts(1, 0, half, host_s=0.0) == 3
    assert Pace(quick).num_drafts(1, 0, half, host_s=0.0015) == 0  # the device would wait for it
    assert Pace(quick).num_drafts(1, 0, [0.9**number for number in range(1, 4)], host_s=0.0015) == 3
    assert Pace().num_drafts(1, 0, half, host_s=0.0) == 8
    looped = StepTimes(prompt_s={16: 0.05}, decode_s={16: 0.05}, loop_s={16: 0.005})
    assert Pace(looped).num_drafts(1, 0, half, host_s=0.0) == 0  # ten steps of a loop take what one alone does
    attending = StepTimes(prompt_s={16: 0.05}, decode_s={16: 0.05}, pair_s=1e-5)
    assert Pace(attending).num_drafts(1, 50_000, half, host_s=0.0) == 0


def test_drafts_are_cut_where_they_leave_the_vocabulary_or_would_end_the_sequence() -> None:
    one = sequence_of(1, 2)
    assert speculation_of(3, 100, 3).propose([one], FREE, 15) == {one: (3,)}
    assert speculation_of(3, -1).propose([one], FREE, 15) == {one: (3,)}
    assert speculation_of(3, 9, 3).propose([one], FREE, 15) == {one: (3,)}
    assert speculation_of(3, 3, 3, 3, 3, 3).propose([one], FREE, 15) == {one: (3, 3, 3, 3)}
    assert speculation_of(3, 3, 3).propose([one], FREE, 2) == {one: (3, 3)}
    assert speculation_of(9, 3).propose([one], FREE, 15) == {}
    ignoring = sequence_of(1, 2, ignore_eos=True, stop_token_ids=(4,))
    assert speculation_of(9, 4).propose([ignoring], FREE, 15) == {ignoring: (9,)}


def test_who_is_wrong_is_no_longer_verified_and_is_again_once_it_would_be_right() -> None:
    speculation, sequence = speculation_of(3, 3), sequence_of(1, 2, max_tokens=500)
    assert speculation.propose([sequence], FREE, 15)
    for token in [5] * 200:
        sequence.token_ids.append(token)
        proposed = speculation.propose([sequence], FREE, 15)
    assert not proposed
    for token in [3] * 40:
        sequence.token_ids.append(token)
        proposed = speculation.propose([sequence], FREE, 15)
    assert proposed == {sequence: (3, 3)}


def test_nobody_is_asked_where_drafts_could_not_pay() -> None:
    def asked(sequence: Sequence) -> tuple[int, ...]:
        raise AssertionError("asked")

    speculation = Speculation(
        Says(asked),
        lambda sequence, draft: draft,
        max_tokens=4,
        max_rows=16,
        vocab_size=100,
        eos_token_ids=(),
        clock=StepClock(),
    )
    sequences = [sequence_of(1, 2) for _ in range(16)]
    assert speculation.propose(sequences, FREE, 0) == {}
    assert speculation.propose(sequences[:1], DEAR, 15) == {}
    speculation.forget(sequences[0])


def test_a_plan_waits_for_tokens_only_where_drafts_are_likely_to_follow_them() -> None:
    sequence = sequence_of(1, 2)
    sequence.num_computed, sequence.num_in_flight = 1, 0
    plan = StepPlan((row_of(sequence, 1, 1),), 1)
    drafted = StepPlan((row_of(sequence, 1, 1, (3,)),), 2)
    sequence.num_in_flight = 1
    assert speculation_of(3, 3).has_to_know(plan, FREE)
    assert not speculation_of(3).has_to_know(plan, FREE)  # that one is in place of the token in flight
    assert not speculation_of(3, 3).has_to_know(plan, DEAR)
    sequence.num_in_flight = 4  # several steps in one dispatch, as many as are drafted at most
    assert speculation_of(3, 3, 3, 3, 3, 3).has_to_know(plan, FREE)
    assert not speculation_of(3, 3, 3, 3).has_to_know(plan, FREE)
    assert speculation_of().has_to_know(drafted, DEAR)
