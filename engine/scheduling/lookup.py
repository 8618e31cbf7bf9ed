"""What is known of a waiting sequence's prefix and the pages that it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.scheduling.amounts import Amount


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one look-up told. It is exact until the pool changes, and bounds what the next one can tell after that."""

    prefix: list[list[int]]  # by group, the pages to start with; to be taken up before anything else changes
    num_pages: Amount  # that starting takes of those that are available
    num_growth: Amount  # that it shall find on top while it runs
    num_usable: int  # tokens that were looked for
    num_matched: int  # their first pages, as far as all groups without a window had them
    num_unshared: Amount  # what it would take if all matched pages could be taken up
    num_unmatched: Amount  # and if all of those were held by others, which makes them free of charge
    cache_exits: Amount  # of the pool, then

    def least(self, cache_exits: Amount) -> Amount:
        """Pages that starting takes at least by now, unless more of the prefix can be matched.

        It takes less than before only where matched pages that were cached are held now. Each of them has left the
        cache since: it was taken up, or evicted and computed anew.
        """
        return self.num_unmatched.most(self.num_unshared - (cache_exits - self.cache_exits))
