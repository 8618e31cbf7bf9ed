"""A worker's capacity is what it does while requests wait."""

from __future__ import annotations

import pytest

from penstock.worker.run.capacity import HALF_LIFE_S, LATEST, Capacity, RecentMeans


def look(capacity: Capacity, now_s: float, num_tokens: int, *, waiting: int = 5, running: int = 3) -> None:
    capacity.note(now_s, num_tokens=num_tokens, num_requests=running, num_waiting=waiting)


def test_nothing_is_known_at_first() -> None:
    capacity = Capacity(64)
    look(capacity, 10, 1000)
    assert (capacity.tokens_per_s, capacity.slots) == (0, 64)


def test_what_it_does_while_requests_wait() -> None:
    capacity = Capacity(64)
    look(capacity, 10, 1000)
    look(capacity, 12, 1800)
    assert capacity.tokens_per_s == 400
    assert 3 < capacity.slots < 64


@pytest.mark.parametrize("idle", ["before", "after", "both"])
def test_nothing_is_learnt_where_there_was_not_enough_to_do(idle: str) -> None:
    capacity = Capacity(64)
    look(capacity, 10, 1000, waiting=0 if idle in ("before", "both") else 5)
    look(capacity, 12, 1010, waiting=0 if idle in ("after", "both") else 5)
    assert (capacity.tokens_per_s, capacity.slots) == (0, 64)


def test_what_was_long_ago_counts_for_less() -> None:
    capacity = Capacity(3)
    look(capacity, 0, 0)
    look(capacity, 1, 400)
    look(capacity, 1 + HALF_LIFE_S, 400 + round(200 * HALF_LIFE_S))
    assert capacity.tokens_per_s == pytest.approx(300)
    look(capacity, 1 + 20 * HALF_LIFE_S, 400 + round(200 * 20 * HALF_LIFE_S))
    assert capacity.tokens_per_s == pytest.approx(200, rel=1e-3)


def test_places_are_those_that_were_taken_and_never_none() -> None:
    capacity = Capacity(64)
    look(capacity, 0, 0)
    look(capacity, HALF_LIFE_S, 1, running=4)
    assert capacity.slots == pytest.approx(34)
    look(capacity, 100 * HALF_LIFE_S, 2, running=0)
    assert capacity.slots == pytest.approx(1)


def test_two_looks_at_one_time_teach_nothing() -> None:
    capacity = Capacity(4)
    look(capacity, 1, 0)
    look(capacity, 1, 100)
    assert capacity.tokens_per_s == 0


def test_means_of_those_that_ended() -> None:
    ended = RecentMeans()
    assert (ended.reply_tokens, ended.token_bytes) == (0, 0)
    ended.add(entry_bytes=400, prompt_tokens=100, reply_tokens=10)
    assert (ended.reply_tokens, ended.token_bytes) == (10, 4)
    ended.add(entry_bytes=200, prompt_tokens=200, reply_tokens=30)
    assert (ended.reply_tokens, ended.token_bytes) == (20, 2)
    for _ in range(20 * LATEST):
        ended.add(entry_bytes=90, prompt_tokens=30, reply_tokens=7)
    assert (ended.reply_tokens, ended.token_bytes) == pytest.approx((7, 3))


def test_a_request_that_had_no_prompt_divides_nothing() -> None:
    ended = RecentMeans()
    ended.add(entry_bytes=400, prompt_tokens=0, reply_tokens=10)
    assert (ended.reply_tokens, ended.token_bytes) == (10, 0)
