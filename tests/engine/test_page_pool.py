"""The page pool: who holds a page, what is cached, what is evicted first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.scheduling.page_pool import SINK_PAGE, PagePool, root_hash

SIZE = 4


def fill(pool: PagePool, token_ids: list[int], salt: str = "") -> list[int]:
    """Holds and indexes the full pages of `token_ids`, as a sequence that computed them would."""
    found, hashes = pool.find_prefix(token_ids, salt)
    pool.acquire(found)
    pages = found + pool.allocate(pool.pages_for(len(token_ids)) - len(found))
    parent = hashes[-1] if hashes else root_hash(salt)
    for i in range(len(found), len(token_ids) // SIZE):
        parent = pool.index(pages[i], parent, token_ids[i * SIZE : (i + 1) * SIZE])
    return pages


def test_the_sink_page_is_never_handed_out() -> None:
    pool = PagePool(5, SIZE)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert SINK_PAGE not in {1, 2, 3, 4}
    assert pool.num_available == 0


def test_a_released_prefix_is_found_again_and_shared() -> None:
    pool = PagePool(10, SIZE)
    tokens = list(range(10))
    first = fill(pool, tokens)
    pool.release(first)
    assert (pool.num_cached, pool.num_free) == (2, 7)
    second, third = fill(pool, tokens), fill(pool, tokens)
    assert second[:2] == third[:2] == first[:2]
    assert second[2] != third[2]
    pool.check()


def test_a_prefix_is_proper_so_that_the_last_token_is_always_computed() -> None:
    pool = PagePool(10, SIZE)
    fill(pool, list(range(8)))
    assert len(pool.find_prefix(list(range(8)), "")[0]) == 1
    assert len(pool.find_prefix(list(range(9)), "")[0]) == 2


def test_another_salt_or_another_beginning_shares_nothing() -> None:
    pool = PagePool(10, SIZE)
    fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.find_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9], "other")[0] == []
    assert pool.find_prefix([0, 2, 3, 4, 5, 6, 7, 8, 9], "")[0] == []


def test_long_salts_that_differ_at_the_end_share_nothing() -> None:
    pool = PagePool(10, SIZE)
    fill(pool, list(range(9)), salt="x" * 100 + "a")
    assert pool.find_prefix(list(range(9)), "x" * 100 + "b")[0] == []
    assert len(pool.find_prefix(list(range(9)), "x" * 100 + "a")[0]) == 2


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    pool = PagePool(5, SIZE)
    old = fill(pool, list(range(9)))[:2]  # two indexed pages; the third stays unindexed
    pool.release([*old, next(iter({1, 2, 3, 4} - set(old) - {4}))])
    assert pool.num_cached == 2
    pool.allocate(3)
    assert pool.find_prefix(list(range(9)), "")[0] == old[:1]
    pool.check()


def test_without_prefix_caching_nothing_is_indexed() -> None:
    pool = PagePool(5, SIZE, prefix_caching=False)
    pool.release(fill(pool, list(range(9))))
    assert (pool.num_cached, pool.num_free) == (0, 4)


def test_forgotten_contents_are_not_found() -> None:
    pool = PagePool(6, SIZE)
    held = fill(pool, list(range(5)))
    pool.release(fill(pool, list(range(100, 105))))
    pool.forget_contents()
    pool.check()
    assert pool.find_prefix(list(range(5)), "")[0] == []
    pool.release(held)
    assert pool.num_free == 5


def test_check_sees_a_page_with_two_owners() -> None:
    pool = PagePool(4, SIZE)
    page = pool.allocate(1)[0]
    pool._free.append(page)
    with pytest.raises(AssertionError, match="each once"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random holders over a tiny alphabet, so that prefixes meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, SIZE)
        self.held: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def hold(self, tokens: list[int]) -> None:
        found, _ = self.pool.find_prefix(tokens, "")
        needed = self.pool.pages_for(len(tokens)) - len(found) + self.pool.count_cached(found)
        if needed <= self.pool.num_available:
            self.held.append((tokens, fill(self.pool, tokens)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[1])

    @invariant()
    def pages_add_up(self) -> None:
        self.pool.check()

    @invariant()
    def a_shared_page_holds_the_same_tokens_for_all(self) -> None:
        content: dict[int, list[int]] = {}
        for tokens, pages in self.held:
            for i, page in enumerate(pages):
                before = tokens[: (i + 1) * SIZE]
                assert content.setdefault(page, before) == before


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
