"""Results of looking up a waiting sequence's prefix, and the pages that it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.scheduling.memory.amounts import Amount


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of one look-up. It is exact until the pool changes; after that it bounds the next result."""

    prefix: list[list[int]]  # pages to start with, by group; to be acquired before anything else changes
    num_pages: Amount  # available pages that starting takes
    num_growth: Amount  # further pages to leave free, for its growth while it runs
    num_usable: int  # tokens that were looked up
    num_matched: int  # leading pages that all groups without a window had
    num_unshared: Amount  # pages it would take if all matched pages could be acquired
    num_unmatched: Amount  # the same if others held all matched pages: sharing those takes no available page
    cache_exits: Amount  # the pool's at that time

    def least(self, cache_exits: Amount) -> Amount:
        """Returns the pages that starting takes now at least, unless more of the prefix can be matched.

        It takes fewer than before only if matched pages that were cached are held now. Each of them has left the cache
        since: it was acquired, or evicted and recomputed.
        """
        return self.num_unmatched.most(self.num_unshared - (cache_exits - self.cache_exits))
