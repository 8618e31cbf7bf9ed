"""Who holds which page of the KV cache, and which pages can serve another sequence with the same prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_HASH_BYTES = 16


class PagePool:
    """Reference-counted pages with a prefix cache.

    Page 0 is the sink: padding tokens write there, and it is never handed out. Every other page is in exactly one of
    three states: held (one or more references), cached (no reference, but its content is indexed and may be taken up
    again), or free. Held pages may be indexed too, then several sequences share them. Only full pages are indexed;
    their content never changes while they are.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._free: deque[int] = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}  # indexed page -> hash of everything up to its end
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

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

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

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
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def find_prefix(self, token_ids: Sequence[int], salt: str, rope_length: int = 0) -> tuple[list[int], list[bytes]]:
        """The longest run of indexed pages that holds a proper prefix of `token_ids`, and their hashes.

        Proper, because the last token has to be computed to sample the next one, and shared pages are never written.
        References are not taken: `acquire` does that.
        """
        pages: list[int] = []
        hashes: list[bytes] = []
        if not self._prefix_caching:
            return pages, hashes
        parent = root_hash(salt, rope_length)
        for end in range(self.page_size, len(token_ids), self.page_size):
            parent = page_hash(parent, token_ids[end - self.page_size : end])
            page = self._page_of.get(parent)
            if page is None:
                break
            pages.append(page)
            hashes.append(parent)
        return pages, hashes

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached, not held: acquiring those takes from `num_available`."""
        return sum(page in self._cached for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Takes a reference to each of these indexed pages."""
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)

    def index(self, page: int, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Makes a full held page findable; returns the hash to pass as the next page's `parent`.

        If another page has the same content already, that one stays the indexed one.
        """
        digest = page_hash(parent, token_ids)
        if self._prefix_caching and digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest
        return digest

    def forget_contents(self) -> None:
        """Drops the whole index, for when the cache's content was lost. Held pages stay held."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def check(self) -> None:
        """Proves the pool's invariants: every page is in exactly one state, the index is a bijection.

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
        if {page: digest for digest, page in self._page_of.items()} != self._hash_of:
            raise AssertionError("the two directions of the prefix index differ")
        if not cached <= set(self._hash_of):
            raise AssertionError(f"cached but not indexed: {cached - set(self._hash_of)}")
        if free & set(self._hash_of):
            raise AssertionError(f"free but indexed: {free & set(self._hash_of)}")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page


def root_hash(salt: str, rope_length: int = 0) -> bytes:
    """What stands for the parent of a sequence's first page: keys of other frequencies are other content."""
    return blake2b(salt.encode(), digest_size=_HASH_BYTES, salt=rope_length.to_bytes(8)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a page's tokens and of everything before them, 16 bytes.

    A cryptographic hash: a prompt crafted to collide must not read another prompt's keys and values.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()
