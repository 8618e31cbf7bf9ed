"""Who holds which page of the KV cache, and which pages can serve another sequence with the same prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.engine.scheduling.page_needs import PageNeeds
from penstock.engine.scheduling.state_pool import StatePool

_HASH_BYTES = 16


class Prefix(NamedTuple):
    """The beginning of a sequence, as far as the pool has it. "Full" groups are those without a window."""

    pages: list[list[int]]  # that can be taken up, by group
    num_matched: int  # pages in a row that all full groups have; more than in `pages` where a window's are gone
    num_shared: int  # of these pages of the full groups, how many somebody holds


class PagePool:
    """Reference-counted pages with a prefix cache.

    Page 0 is the sink: padding tokens write there, and it is never handed out. Every other page is in exactly one of
    three states: held (one or more references), cached (no reference, but its content is indexed and may be taken up
    again), or free. Held pages may be indexed too, then several sequences share them. Only full pages are indexed, by
    the group of layers whose keys and values they hold; their content never changes while they are.

    Of a model whose layers keep recurrent states, a prefix can be taken up where its pages end and a state is: those
    are counted beside the pages, in `states`, by the same hashes. A state goes with its page.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),  # of the groups of layers
        prefix_caching: bool = True,
        num_states: int = 0,  # slots for them, slot 0 included; 0 for a model that has none
        state_interval: int = 1,  # pages, at whose end a state is kept for other sequences
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.needs = PageNeeds(page_size, windows)
        self.states = StatePool(num_states)
        self.state_interval = state_interval
        self.is_caching = prefix_caching
        self._full_groups = [group for group, window in enumerate(windows) if window is None]
        self._free: deque[int] = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self._key_of: dict[int, tuple[int, bytes]] = {}  # indexed page -> group, hash of everything up to its end
        self._page_of: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)  # by group
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.num_cache_exits = 0  # how often a page has left `_cached`, taken up or evicted

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_references(self) -> int:
        return sum(self._references)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` pages, evicting the least recently used cached ones where free ones run out.

        The caller has checked `num_available`.

        Raises:
            AssertionError: it has not. Nothing is handed out then.
        """
        if count > self.num_available:
            raise AssertionError(f"{count} pages asked for, {self.num_available} are there")
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one reference to each page. Later pages are evicted first: prefixes outlive their tails."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def find_prefix(self, hashes: Iterable[bytes]) -> Prefix:
        """The indexed pages of the longest prefix that can be taken up; `hashes` are those of its pages.

        Of a group with a window it takes those pages that the token behind the prefix sees, and has page 0 for those
        before. Where the model keeps states, the prefix ends where one is. References are not taken: `acquire` does
        that.
        """
        found: list[list[int]] = [[] for _ in self._page_of]
        if not self.is_caching:
            return Prefix(found, 0, 0)
        in_a_row = [0] * len(found)  # pages that are there, up to the last one looked for
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
        num_shared = sum(self._references[page] > 0 for group in self._full_groups for page in found[group])
        return Prefix([self._kept(group, pages[:length]) for group, pages in enumerate(found)], num_matched, num_shared)

    def has_page(self, digest: bytes) -> bool:
        """Whether all full groups have this page indexed: a prefix without it ends before it."""
        return all(digest in self._page_of[group] for group in self._full_groups)

    def _first_seen(self, group: int, num_pages: int) -> int:
        """Of a prefix of so many pages, the first that the token behind it sees."""
        return self.needs.first_seen(group, num_pages * self.page_size)

    def _kept(self, group: int, prefix: list[int]) -> list[int]:
        first = self._first_seen(group, len(prefix))
        return [0] * first + prefix[first:]

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached, not held: acquiring those takes from `num_available`."""
        return sum(page in self._cached for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Takes a reference to each of these indexed pages."""
        for page in pages:
            self._references[page] += 1
            if page in self._cached:
                del self._cached[page]
                self.num_cache_exits += 1

    def index(self, page: int, digest: bytes, group: int = 0) -> None:
        """Makes a full held page findable by the hash of the tokens up to its end.

        If another page has the same content already, that one stays the indexed one.
        """
        if self.is_caching and digest not in self._page_of[group]:
            self._page_of[group][digest] = page
            self._key_of[page] = group, digest

    def forget_contents(self) -> None:
        """Drops the whole index, for when the content of pages and states was lost. Held ones stay held."""
        self.states.forget_contents()
        self._free.extend(self._cached)
        self.num_cache_exits += len(self._cached)
        self._cached.clear()
        self._key_of.clear()
        for pages in self._page_of:
            pages.clear()

    def check(self) -> None:
        """Proves the pool's invariants: every page is in exactly one state, the index is a bijection. So with the slots
        for states; and whoever finds a state finds its page.

        Raises:
            AssertionError: what does not hold.
        """
        held = {page for page, count in enumerate(self._references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        states = [page for group in (self._free, self._cached, held) for page in group]
        if sorted(states) != list(range(1, self.num_pages)):
            raise AssertionError(
                f"free {len(free)} + cached {len(cached)} + held {len(held)} pages are not the {self.num_pages - 1} "
                f"there are, each once"
            )
        if min(self._references, default=0) < 0:
            raise AssertionError(f"negative reference count: {self._references}")
        by_page = {page: (group, key) for group, pages in enumerate(self._page_of) for key, page in pages.items()}
        if by_page != self._key_of:
            raise AssertionError("the two directions of the prefix index differ")
        if not cached <= set(self._key_of):
            raise AssertionError(f"cached but not indexed: {cached - set(self._key_of)}")
        if free & set(self._key_of):
            raise AssertionError(f"free but indexed: {free & set(self._key_of)}")
        self.states.check()
        lone = [digest for digest in self.states.indexed if not self.has_page(digest)]
        if lone:
            raise AssertionError(f"{len(lone)} states are indexed whose pages are not")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.num_cache_exits += 1
        group, digest = self._key_of.pop(page)
        del self._page_of[group][digest]
        self.states.forget(digest)  # a prefix that ends there can't be taken up any more
        return page


def root_hash(salt: str, rope_length: int = 0) -> bytes:
    """What stands for the parent of a sequence's first page: keys of other frequencies are other content."""
    return blake2b(salt.encode(), digest_size=_HASH_BYTES, salt=rope_length.to_bytes(8)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a page's tokens and of everything before them, 16 bytes.

    A cryptographic hash: a prompt crafted to collide must not read another prompt's keys and values.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()
