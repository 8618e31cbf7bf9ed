"""The pages of one kind: free, held, or cached because their content can be found."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Key: TypeAlias = tuple[int, bytes]
"""Key of an indexed page: its layer group, and the hash of everything up to its end."""


class PageStore:
    """Reference-counted pages.

    Page 0 is the sink: padding tokens write there, and it is never handed out. Every other page is in exactly one of
    three states: held (one or more references), cached (no reference, but it has a key), or free.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.key_of: dict[int, Key] = {}  # of indexed pages
        self.references = [0] * num_pages
        self.num_cache_exits = 0  # how often a page has left `cached`, acquired or evicted
        self.free: deque[int] = deque(range(1, num_pages))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `take` could hand out now, cached ones included."""
        return len(self.free) + len(self.cached)

    def take(self) -> tuple[int, Key | None]:
        """Returns a free page, or the least recently used cached page together with its former key."""
        key = None
        if self.free:
            page = self.free.popleft()
        else:
            page, _ = self.cached.popitem(last=False)
            self.num_cache_exits += 1
            key = self.key_of.pop(page)
        self.references[page] = 1
        return page, key

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page. Later pages are evicted first: prefixes outlive their tails."""
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self.key_of:
                    self.cached[page] = None
                else:
                    self.free.append(page)

    def acquire(self, pages: Iterable[int]) -> None:
        """Takes a reference to each of these indexed pages."""
        for page in pages:
            self.references[page] += 1
            if page in self.cached:
                del self.cached[page]
                self.num_cache_exits += 1

    def forget_contents(self) -> None:
        """Drops all keys. Held pages stay held."""
        self.free.extend(self.cached)
        self.num_cache_exits += len(self.cached)
        self.cached.clear()
        self.key_of.clear()

    def check(self) -> None:
        """Checks that every page is in exactly one state, and has a key exactly if that state requires one.

        Raises:
            AssertionError: an invariant does not hold.
        """
        held = {page for page, count in enumerate(self.references) if count > 0}
        free, cached = set(self.free), set(self.cached)
        states = [page for group in (self.free, self.cached, held) for page in group]
        if sorted(states) != list(range(1, self.num_pages)):
            raise AssertionError(
                f"free {len(free)} + cached {len(cached)} + held {len(held)} pages are not the {self.num_pages - 1} "
                f"there are, each once"
            )
        if min(self.references, default=0) < 0:
            raise AssertionError(f"negative reference count: {self.references}")
        if not cached <= set(self.key_of):
            raise AssertionError(f"cached but not indexed: {cached - set(self.key_of)}")
        if free & set(self.key_of):
            raise AssertionError(f"free but indexed: {free & set(self.key_of)}")
