"""Tracks who holds which page of the KV cache, and which pages can serve other sequences with the same prefix."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.page_needs import PageNeeds
from penstock.engine.scheduling.memory.page_store import PageStore
from penstock.engine.scheduling.memory.state_pool import StatePool

_HASH_BYTES = 16


class Prefix(NamedTuple):
    """The part of a sequence's prefix that the pool has. "Full" groups are those without a window."""

    pages: list[list[int]]  # that can be acquired, by group
    num_matched: int  # leading pages that all full groups have; more than in `pages` if pages of a window are gone
    num_shared: Amount  # matched pages of the full groups that somebody holds


class PagePool:
    """Everything that sequences can hold: pages of each kind, with a prefix cache, and states.

    A PageStore for each kind counts its pages, which are numbered within it. Held pages may be indexed, so that several
    sequences share them. Only full pages are indexed, by the layer group whose keys and values they hold; their content
    never changes while they are indexed.

    If a model's layers keep recurrent states, a prefix can only be reused up to a page whose end has a state. States
    are counted next to the pages, in `states`, by the same hashes. A state is dropped with its page.
    """

    def __init__(
        self,
        num_pages: int | Sequence[int],  # of each kind, page 0 included
        page_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),  # by layer group
        kinds: tuple[int, ...] | None = None,  # of each group's pages; None: all of one kind
        prefix_caching: bool = True,
        num_states: int = 0,  # state slots, slot 0 included; 0 for a model without states
        state_interval: int = 1,  # pages between states kept for other sequences
    ) -> None:
        self.page_size = page_size
        self.needs = PageNeeds(page_size, windows, (0,) * len(windows) if kinds is None else kinds)
        self.stores = tuple(map(PageStore, (num_pages,) if isinstance(num_pages, int) else num_pages))
        self.states = StatePool(num_states)
        self.state_interval = state_interval
        self.is_caching = prefix_caching
        self._full_groups = [group for group, window in enumerate(windows) if window is None]
        self._page_of: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)  # by group

    @property
    def num_pages(self) -> int:
        """Pages of all kinds together, the sinks included."""
        return sum(store.num_pages for store in self.stores)

    @property
    def available(self) -> Amount:
        """Pages that `allocate` could hand out now, cached ones included."""
        return Amount(tuple(store.num_available for store in self.stores))

    @property
    def num_available(self) -> int:
        """Available pages of all kinds together."""
        return sum(store.num_available for store in self.stores)

    @property
    def num_free(self) -> int:
        return sum(len(store.free) for store in self.stores)

    @property
    def num_cached(self) -> int:
        return sum(len(store.cached) for store in self.stores)

    @property
    def references(self) -> Amount:
        """References to pages of each kind, counted once per holder."""
        return Amount(tuple(sum(store.references) for store in self.stores))

    @property
    def cache_exits(self) -> Amount:
        """Number of times that pages of each kind have left the cache."""
        return Amount(tuple(store.num_cache_exits for store in self.stores))

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Hands out `count` pages for a group, evicting least recently used cached pages of its kind if needed.

        The caller has checked `available`.

        Raises:
            AssertionError: there are too few. Nothing is handed out.
        """
        store = self._store(group)
        if count > store.num_available:
            raise AssertionError(f"{count} pages asked for, {store.num_available} are there")
        return [self._allocate_one(store) for _ in range(count)]

    def release(self, pages: Sequence[int], kind: int = 0) -> None:
        """Drops one reference to each page of a kind. Later pages are evicted first: prefixes outlive their tails."""
        self.stores[kind].release(pages)

    def find_prefix(self, hashes: Iterable[bytes]) -> Prefix:
        """Returns the indexed pages of the longest reusable prefix, given the hashes of its pages.

        A group with a window needs only the pages that the token after the prefix sees, and has page 0 for earlier
        ones. If the model keeps states, the prefix ends at a state. No references are taken: `acquire` does that.
        """
        found: list[list[int]] = [[] for _ in self._page_of]
        if not self.is_caching:
            return Prefix(found, 0, self._held_of(found))
        in_a_row = [0] * len(found)  # found pages in a row, up to the last one looked up
        length = num_matched = 0
        for digest in hashes:
            if not self.has_page(digest):
                break
            num_matched += 1
            for group, pages in enumerate(found):
                pages.append(self._page_of[group].get(digest, 0))
                in_a_row[group] = in_a_row[group] + 1 if pages[-1] else 0
            if all(num_matched - self._first_seen(group, num_matched) <= there for group, there in enumerate(in_a_row)):
                length = num_matched if not self.states.num_slots or self.states.find(digest) else length
        kept = [self._kept(group, pages[:length]) for group, pages in enumerate(found)]
        return Prefix(kept, num_matched, self._held_of(found))

    def has_page(self, digest: bytes) -> bool:
        """Whether all full groups have this page indexed; a prefix without it ends before it."""
        return all(digest in self._page_of[group] for group in self._full_groups)

    def count_cached(self, pages: Iterable[int], kind: int = 0) -> int:
        """Counts the `pages` that are cached, not held: acquiring those takes from the available ones."""
        return sum(page in self.stores[kind].cached for page in pages)

    def acquire(self, pages: Sequence[int], kind: int = 0) -> None:
        """Takes a reference to each of these indexed pages of a kind."""
        self.stores[kind].acquire(pages)

    def index(self, page: int, digest: bytes, group: int = 0) -> None:
        """Indexes a full held page under the hash of the tokens up to its end.

        If another page already has the same content, that one stays indexed.
        """
        if self.is_caching and digest not in self._page_of[group]:
            self._page_of[group][digest] = page
            self._store(group).key_of[page] = group, digest

    def forget_contents(self) -> None:
        """Drops the whole index after the content of pages and states was lost. Held ones stay held."""
        self.states.forget_contents()
        for store in self.stores:
            store.forget_contents()
        for pages in self._page_of:
            pages.clear()

    def check(self) -> None:
        """Checks that every page and slot is in exactly one condition, the index is a bijection, and states have pages.

        Raises:
            AssertionError: an invariant does not hold.
        """
        for kind, store in enumerate(self.stores):
            store.check()
            groups = [(group, pages) for group, pages in enumerate(self._page_of) if self.needs.kinds[group] == kind]
            if {page: (group, key) for group, pages in groups for key, page in pages.items()} != store.key_of:
                raise AssertionError("the two directions of the prefix index differ")
        self.states.check()
        lone = [digest for digest in self.states.indexed if not self.has_page(digest)]
        if lone:
            raise AssertionError(f"{len(lone)} states are indexed whose pages are not")

    def _store(self, group: int) -> PageStore:
        return self.stores[self.needs.kinds[group]]

    def _held_of(self, found: list[list[int]]) -> Amount:
        """Returns the number of the full groups' pages that are held."""
        counts = [0] * len(self.stores)
        for group in self._full_groups:
            references = self._store(group).references
            counts[self.needs.kinds[group]] += sum(references[page] > 0 for page in found[group])
        return Amount(tuple(counts))

    def _first_seen(self, group: int, num_pages: int) -> int:
        """Returns the first page of a prefix of `num_pages` that the token after it sees."""
        return self.needs.first_seen(group, num_pages * self.page_size)

    def _kept(self, group: int, prefix: list[int]) -> list[int]:
        first = self._first_seen(group, len(prefix))
        return [0] * first + prefix[first:]

    def _allocate_one(self, store: PageStore) -> int:
        page, key = store.take()
        if key is not None:
            group, digest = key
            del self._page_of[group][digest]
            self.states.forget(digest)  # a prefix that ends there can't be reused any more
        return page


def root_hash(salt: str, rope_length: int = 0) -> bytes:
    """Returns the parent hash of a sequence's first page. Keys with other rotary frequencies are other content."""
    return blake2b(salt.encode(), digest_size=_HASH_BYTES, salt=rope_length.to_bytes(8)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns a 16-byte hash of a page's tokens and of everything before them.

    The hash is cryptographic: a prompt crafted to collide must not read another prompt's keys and values.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()
