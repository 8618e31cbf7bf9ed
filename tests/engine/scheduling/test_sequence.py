"""A sequence's counts and seed follow from the request alone."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.sequence import Sequence

REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=7), n=2)


def test_tokens_in_flight_exist_and_are_still_to_be_computed() -> None:
    sequence = Sequence(REQUEST, 0, 0)
    assert (sequence.num_tokens, sequence.num_generated, sequence.num_pending) == (3, 0, 3)
    sequence.num_computed, sequence.num_in_flight = 3, 1
    assert (sequence.num_tokens, sequence.num_generated, sequence.num_pending) == (4, 1, 1)
    sequence.token_ids.append(9)
    sequence.num_in_flight = 0
    assert (sequence.num_tokens, sequence.num_generated, sequence.num_pending) == (4, 1, 1)


def test_the_newest_token_is_not_certain_to_be_computed() -> None:
    sequence = Sequence(REQUEST, 0, 0)
    sequence.num_computed = 2
    assert sequence.num_certain == 2
    sequence.num_computed = 6  # a dispatch of several steps: the newest token may have ended the row
    assert sequence.num_certain == 2


def test_only_pages_of_one_salt_and_one_rotary_length_are_alike() -> None:
    page, other = Sequence(REQUEST, 0, 0).page_hash(0, 2), Sequence(replace(REQUEST, id="other"), 1, 5)
    assert other.page_hash(0, 2) == page
    other.rotate_for(8)
    assert other.page_hash(0, 2) != page
    assert Sequence(replace(REQUEST, cache_salt="salt"), 0, 0).page_hash(0, 2) != page


def test_a_resumed_choice_begins_with_its_own_tokens() -> None:
    resumed = replace(REQUEST, generated=((8,), (5, 6)))
    first, second = (Sequence(resumed, index, 0) for index in range(2))
    assert (first.token_ids, second.token_ids) == ([1, 2, 3, 8], [1, 2, 3, 5, 6])
    assert (first.num_generated, second.num_generated) == (1, 2)
    assert first.num_prompt == second.num_prompt == 3


def test_seeds_differ_by_choice_and_are_the_same_on_every_worker() -> None:
    seeds = [Sequence(REQUEST, index, arrival).seed for index in range(2) for arrival in (0, 5)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert Sequence(replace(REQUEST, id="other"), 0, 0).seed == seeds[0]  # a seed of its own
    unseeded = replace(REQUEST, sampling=SamplingParams())
    assert Sequence(unseeded, 0, 0).seed == Sequence(unseeded, 0, 3).seed
    assert Sequence(unseeded, 0, 0).seed != Sequence(replace(unseeded, id="other"), 0, 0).seed
    assert Sequence(Request("r", (1,), SamplingParams(seed=0)), 0, 0).seed == 5857645148978988075  # never changes


def test_priority_comes_before_arrival_and_arrival_before_the_choice() -> None:
    urgent = Sequence(replace(REQUEST, priority=1), 1, 9)
    early, sibling, late = Sequence(REQUEST, 0, 1), Sequence(REQUEST, 1, 1), Sequence(REQUEST, 0, 2)
    assert sorted([late, sibling, urgent, early], key=lambda sequence: sequence.rank) == [urgent, early, sibling, late]
