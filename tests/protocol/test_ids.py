"""Request ids are hard to guess, and in the slot that was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from penstock.protocol.ids import NUM_SLOTS, new_id, random_slot, slot_of
from penstock.protocol.wire import ID_PATTERN


def test_ids_differ_and_are_ids() -> None:
    found = {new_id() for _ in range(1000)}
    assert len(found) == 1000
    assert all(ID_PATTERN.fullmatch(each) for each in found)
    assert min(map(len, found)) >= 24  # 144 bits, six to a character


@pytest.mark.parametrize("slot", [0, 1, NUM_SLOTS // 2, NUM_SLOTS - 1])
def test_an_id_of_a_slot_lies_in_it(slot: int) -> None:
    for _ in range(20):
        made = new_id(slot)
        assert ID_PATTERN.fullmatch(made)
        assert slot_of(made) == slot


@given(slot=st.integers(0, NUM_SLOTS - 1))
def test_any_slot_can_be_asked_for(slot: int) -> None:
    assert slot_of(new_id(slot)) == slot


@given(text=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="{}"), min_size=1))
def test_slots_are_those_of_the_redis_library(text: str) -> None:
    assert slot_of(text) == key_slot(f"penstock:q:{{{text}}}:reply".encode())


def test_a_random_slot_is_one() -> None:
    assert all(0 <= random_slot() < NUM_SLOTS for _ in range(1000))
