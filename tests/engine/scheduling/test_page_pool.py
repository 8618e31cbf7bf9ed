"""The page pool: who holds a page, what is cached, what is evicted first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.page_pool import PagePool, page_hash, root_hash

SIZE = 4


def hashes(token_ids: list[int], salt: str = "") -> Iterator[bytes]:
    """Yields the hashes of the full pages."""
    digest = root_hash(salt)
    for end in range(SIZE, len(token_ids) + 1, SIZE):
        digest = page_hash(digest, token_ids[end - SIZE : end])
        yield digest


def find(pool: PagePool, token_ids: list[int], salt: str = "") -> list[int]:
    return pool.find_prefix(hashes(token_ids, salt)).pages[0]


def fill(pool: PagePool, token_ids: list[int], salt: str = "") -> list[int]:
    """Holds and indexes the full pages of `token_ids`, as a sequence that computed them would."""
    found = find(pool, token_ids, salt)
    pool.acquire(found)
    pages = found + pool.allocate(pool.needs.pages_for(len(token_ids)) - len(found))
    for page, digest in list(zip(pages, hashes(token_ids, salt), strict=False))[len(found) :]:
        pool.index(page, digest)
    return pages


def index(pool: PagePool, token_ids: list[int], *groups: list[int]) -> None:
    """Makes pages findable that hold `token_ids`; where a group has page 0 there is none."""
    for group, pages in enumerate(groups):
        for page, digest in zip(pages, hashes(token_ids), strict=True):
            if page:
                pool.index(page, digest, group)


def test_the_sink_page_is_never_handed_out() -> None:
    pool = PagePool(5, SIZE)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert 0 not in {1, 2, 3, 4}
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


def test_another_salt_or_another_beginning_shares_nothing() -> None:
    pool = PagePool(10, SIZE)
    fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert find(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9], "other") == []
    assert find(pool, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == []


def test_long_salts_that_differ_at_the_end_share_nothing() -> None:
    pool = PagePool(10, SIZE)
    fill(pool, list(range(9)), salt="x" * 100 + "a")
    assert find(pool, list(range(9)), "x" * 100 + "b") == []
    assert len(find(pool, list(range(9)), "x" * 100 + "a")) == 2


def test_a_hit_takes_of_a_window_only_the_pages_that_the_next_token_sees() -> None:
    pool = PagePool(20, SIZE, windows=(None, 5))
    full, sliding = pool.allocate(4), pool.allocate(4)
    index(pool, list(range(16)), full, sliding)
    assert find(pool, list(range(16))) == full
    assert pool.find_prefix(hashes(list(range(16)))).pages == [full, [0, 0, 0, sliding[3]]]  # token 16 sees 12 to 15
    assert pool.find_prefix(hashes(list(range(4)))).pages == [full[:1], sliding[:1]]


def test_a_window_of_one_needs_no_page_and_one_of_a_page_and_two_needs_two() -> None:
    tokens = list(range(12))
    for window, expected in ((1, [0, 0, 0]), (2, [0, 0, 3]), (SIZE + 1, [0, 0, 3]), (SIZE + 2, [0, 2, 3])):
        pool = PagePool(9, SIZE, windows=(window,))
        index(pool, tokens, pool.allocate(3))
        assert pool.find_prefix(hashes(tokens)).pages == [expected]


def test_a_prefix_whose_window_is_gone_is_taken_up_to_where_it_is_there() -> None:
    pool = PagePool(20, SIZE, windows=(None, 6))
    full, sliding = pool.allocate(4), pool.allocate(4)
    index(pool, list(range(16)), full, [*sliding[:2], 0, sliding[3]])
    found = pool.find_prefix(hashes(list(range(16))))
    assert found.pages == [full[:2], sliding[:2]]  # 3 pages and 4 both need the third
    assert (found.num_matched, found.num_shared) == (4, Amount.of(4))
    index(pool, list(range(16)), full, sliding)
    assert pool.find_prefix(hashes(list(range(16)))).pages == [full, [0, 0, *sliding[2:]]]


def test_pages_of_two_kinds_are_counted_each_by_themselves() -> None:
    pool = PagePool((4, 6), SIZE, windows=(None, 6), kinds=(0, 1))
    full, sliding = pool.allocate(3, 0), pool.allocate(3, 1)
    assert (full, sliding) == ([1, 2, 3], [1, 2, 3])  # numbers of their own
    assert pool.available == Amount.of(0, 2)
    with pytest.raises(AssertionError, match="1 pages asked for, 0"):
        pool.allocate(1, 0)
    index(pool, list(range(12)), full, sliding)
    pool.release(full, 0)
    pool.release(sliding, 1)
    assert (pool.num_cached, pool.num_free) == (6, 2)
    assert pool.find_prefix(hashes(list(range(12)))).pages == [full, [0, *sliding[1:]]]
    pool.allocate(5, 1)  # evicts all of its kind, and none of the other
    assert (pool.num_cached, pool.available) == (3, Amount.of(3, 0))
    assert pool.find_prefix(hashes(list(range(12)))).pages == [[], []]
    pool.check()
    pool.stores[1].references[2] = 0
    with pytest.raises(AssertionError, match="each once"):
        pool.check()


def test_where_all_layers_have_a_window_a_gap_before_it_does_no_harm() -> None:
    pool = PagePool(20, SIZE, windows=(4,))
    pages = pool.allocate(4)
    index(pool, list(range(16)), [0, pages[1], 0, pages[3]])
    assert pool.find_prefix(hashes(list(range(16)))).pages == [[0, 0, 0, pages[3]]]
    assert pool.find_prefix(hashes(list(range(12)))).pages == [[0, pages[1]]]


def test_groups_do_not_find_each_others_pages() -> None:
    pool = PagePool(20, SIZE, windows=(None, None))
    first, second = pool.allocate(2), pool.allocate(2)
    index(pool, list(range(8)), first, [second[0], 0])
    assert pool.find_prefix(hashes(list(range(8)))).pages == [first[:1], second[:1]]
    pool.check()


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    pool = PagePool(5, SIZE)
    old = fill(pool, list(range(9)))[:2]  # two indexed pages; the third stays unindexed
    pool.release([*old, next(iter({1, 2, 3, 4} - set(old) - {4}))])
    assert pool.num_cached == 2
    pool.allocate(3)
    assert find(pool, list(range(9))) == old[:1]
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
    assert find(pool, list(range(5))) == []
    pool.release(held)
    assert pool.num_free == 5


def test_check_sees_a_page_with_two_owners() -> None:
    pool = PagePool(4, SIZE)
    page = pool.allocate(1)[0]
    pool.stores[0].free.append(page)
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
        found = find(self.pool, tokens)
        needed = self.pool.needs.pages_for(len(tokens)) - len(found) + self.pool.count_cached(found)
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
