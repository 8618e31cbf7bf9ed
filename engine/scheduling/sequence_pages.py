"""Hands pages and state slots to sequences as their tokens are computed, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable
from operator import floordiv

from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.lookup import Lookup
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.memory.page_table import PageTable
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.sequence_states import SequenceStates
from penstock.engine.scheduling.step_plan import Row

LOOKAHEAD_PAGES = 4
"""Pages by which every running sequence can still grow after an admission; with fewer, it is preempted at once."""


class SequencePages:
    """Moves pages between the pool and the tables of running sequences, which grow by one page of each group at a time.

    Available and missing pages are amounts by kind: the first kind that runs out decides. A sequence's states are
    counted here too (`SequenceStates`).

    This class says what is missing and whether there is enough; the scheduler decides who goes without.
    """

    def __init__(self, pool: PagePool, max_batch_tokens: int) -> None:
        self._pool = pool
        self._states = SequenceStates(pool)
        self._needs = pool.needs
        self._groups = [
            [group for group, of in enumerate(pool.needs.kinds) if of == kind] for kind in range(pool.needs.num_kinds)
        ]
        self._groups_by_kind = [len(groups) for groups in self._groups]
        self._page_size = pool.page_size
        self._max_batch_tokens = max_batch_tokens

    @property
    def available(self) -> Amount:
        return self._pool.available

    def look_up(self, sequence: Sequence) -> Lookup:
        """Finds the cached part of a waiting sequence's prefix. The cost grows with the prefix's length."""
        size, num_usable = self._page_size, _num_usable(sequence)
        found = self._pool.find_prefix(sequence.page_hash(i, size) for i in range(num_usable // size))
        pages = self.most(sequence, sequence.num_tokens + 1)
        sequence.lookup = Lookup(
            found.pages,
            num_pages=pages - self._full_group_pages(map(self._num_held, found.pages, self._needs.kinds)),
            num_growth=self.to_grow(sequence),
            num_usable=num_usable,
            num_matched=found.num_matched,
            num_unshared=pages - found.num_shared,
            num_unmatched=pages - self._full_group_pages([found.num_matched] * self._needs.num_groups),
            cache_exits=self._pool.cache_exits,
        )
        return sequence.lookup

    def _full_group_pages(self, counts: Iterable[int]) -> Amount:
        """Sums page counts of the full groups: what a window moves past is replaced, no matter who else holds it."""
        windows = self._needs.windows
        return self._needs.by_kind(
            count if window is None else 0 for count, window in zip(counts, windows, strict=True)
        )

    def _num_held(self, pages: list[int], kind: int) -> int:
        """Returns how many of these indexed pages others hold; cached pages would come out of the available ones."""
        return len(pages) - self._pool.count_cached(pages, kind)

    def least_to_admit(self, sequence: Sequence) -> Amount | None:
        """Returns the fewest pages that a waiting sequence takes, by its last look-up; None if that is outdated.

        The cost does not depend on the prefix's length.
        """
        lookup, size = sequence.lookup, self._page_size
        if lookup is None or lookup.num_usable != _num_usable(sequence):
            return None
        end = lookup.num_matched
        if end < lookup.num_usable // size and self._pool.has_page(sequence.page_hash(end, size)):
            return None
        return lookup.least(self._pool.cache_exits)

    def start(self, sequence: Sequence, cached: list[list[int]]) -> None:
        """Acquires the pages of a prefix, and a state; their tokens count as computed. The caller has checked
        `has_state`.
        """
        num_matched = 0 if sequence.lookup is None else sequence.lookup.num_matched
        sequence.lookup = None
        sequence.pages = PageTable(cached)
        for kind, groups in enumerate(self._groups):
            self._pool.acquire(list(sequence.pages.held_by(groups)), kind)
        num_pages = sequence.num_indexed = sequence.pages.num_places
        sequence.num_computed = num_pages * self._page_size
        digest = sequence.page_hash(num_pages - 1, self._page_size) if num_pages else None
        self._states.start(sequence, digest, num_matched)

    @property
    def has_state(self) -> bool:
        """Whether a waiting sequence would get a slot for its state."""
        return self._states.has_one

    def route(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Returns the rows of a plan with the states that they read and write; their tokens count as computed."""
        return self._states.route(rows)

    def release(self, sequence: Sequence) -> None:
        self._states.release(sequence)
        for kind, groups in enumerate(self._groups if sequence.pages else ()):
            self._pool.release(list(sequence.pages.held_by(groups)), kind)
        sequence.pages, sequence.num_indexed, sequence.num_computed = PageTable(), 0, 0

    def capacity(self, sequence: Sequence) -> int:
        """Returns how many tokens the pages of `sequence` hold, including those that its windows have moved past."""
        return sequence.pages.num_places * self._page_size

    def reach(self, sequence: Sequence) -> int:
        """Returns the capacity that `sequence` would have with all available pages."""
        places: int = min(map(floordiv, self._pool.available.counts, self._groups_by_kind))
        return self.capacity(sequence) + places * self._page_size

    def missing(self, sequence: Sequence, num_tokens: int) -> Amount:
        """Returns the pages that `sequence` lacks for its first `num_tokens` tokens, in all groups."""
        places = self._missing_places(sequence, num_tokens)
        return Amount(tuple(places * num_groups for num_groups in self._groups_by_kind))

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives `sequence` the pages that it lacks for `num_tokens`; the caller has checked that they are available."""
        places = self._missing_places(sequence, num_tokens)
        if places:
            sequence.pages.extend([self._pool.allocate(places, group) for group in range(self._needs.num_groups)])

    def _missing_places(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self._needs.pages_for(num_tokens) - sequence.pages.num_places)

    def let_pass(self, sequence: Sequence) -> None:
        """Releases the pages that no token still to be computed sees. They stay indexed.

        A step in flight may still read them: their next holder writes to them in a later step.
        """
        if not self._needs.has_windows:
            return
        self.index_full(sequence)
        for group, kind in enumerate(self._needs.kinds):
            first = self._needs.first_seen(group, sequence.num_computed)
            if first > sequence.pages.num_passed[group]:
                self._pool.release(sequence.pages.pass_by(group, first), kind)

    def index_full(self, sequence: Sequence) -> None:
        """Indexes pages whose tokens are all known and certainly computed."""
        size = self._page_size
        num_full = sequence.num_certain // size
        for i in range(sequence.num_indexed, num_full):
            for group, pages in enumerate(sequence.pages.groups):
                if pages[i]:  # 0 if its window had moved past before all of its tokens were known
                    self._pool.index(pages[i], sequence.page_hash(i, size), group)
            sequence.num_indexed = i + 1
        self._states.index_full(sequence)

    def hold_for_drafts(self, sequence: Sequence, count: int) -> int:
        """Gives a sequence memory for up to `count` drafts after its next token. Returns how many fit."""
        count = min(count, self.reach(sequence) - sequence.num_computed - 1)
        count = max(0, self._states.room_for_drafts(count))
        if count:
            self.extend(sequence, sequence.num_computed + 1 + count)
            self._states.hold_drafts(sequence, count)
        return count

    def most(self, sequence: Sequence, num_tokens: int) -> Amount:
        """Returns the most pages that a sequence holds at once until it has `num_tokens` tokens."""
        return self._needs.held(num_tokens, min(sequence.num_pending, self._max_batch_tokens))

    def fits_alone(self, sequence: Sequence) -> bool:
        """Whether the sequence can be computed alone, in steps as small as pages require."""
        return self._needs.held(sequence.num_tokens + 1, 1).fits(self._pool.available)

    def to_grow(self, sequence: Sequence) -> Amount:
        """Returns the pages that a sequence will still need, for pending tokens and up to the look-ahead for new ones.

        For a waiting sequence they come on top of those that it starts with.
        """
        num_tokens = sequence.num_tokens
        end = min(num_tokens + LOOKAHEAD_PAGES * self._page_size, max(num_tokens, sequence.max_tokens))
        held = self._held(sequence) if sequence.pages else self.most(sequence, num_tokens + 1)
        return (self.most(sequence, end) - held).at_least(0)

    def _held(self, sequence: Sequence) -> Amount:
        return self._needs.by_kind(sequence.pages.num_held)

    def check(self, running: list[Sequence]) -> None:
        """Checks that the pool and the tables agree, and that each page or state still to be read or written is held.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self._pool.check()
        self._states.check(running)
        held = sum((self._held(sequence) for sequence in running), self._needs.by_kind([0] * self._needs.num_groups))
        if held != self._pool.references:
            raise AssertionError(f"sequences hold {held} pages, the pool counts {self._pool.references}")
        for sequence in running:
            self._check_table(sequence)

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.pages
        if sequence.num_computed > self.capacity(sequence):
            raise AssertionError(f"{sequence.num_computed} tokens computed in {table.num_places} pages")
        for group, (pages, passed) in enumerate(zip(table.groups, table.num_passed, strict=True)):
            if passed > self._needs.first_seen(group, sequence.num_computed):
                raise AssertionError(f"group {group} gave back {passed} pages after {sequence.num_computed} tokens")
            if len(pages) != table.num_places or any(pages[:passed]) or not all(pages[passed:]):
                raise AssertionError(f"group {group} has pages {pages}, of which {passed} were given back")


def _num_usable(sequence: Sequence) -> int:
    """Returns how many of a waiting sequence's tokens may come from cached pages.

    A cached token has keys and values, but no hidden state to score the next token with. And the last token has to be
    computed to sample the next one: shared pages are never written.
    """
    return sequence.num_scored if sequence.num_unscored else len(sequence.token_ids) - 1
