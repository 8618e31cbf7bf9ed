"""Which waiting sequences may start: in the order of rank, but small ones do not wait behind what does not fit."""

from __future__ import annotations

import math

from penstock.engine.scheduling.lookup import Lookup
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.sequence_pages import SequencePages

PASSING = 1
"""Those behind a sequence that waits for pages may take so many times the pages that it needs to start.

Letting them pass may delay it, by the pages that they hold. Holding them back leaves pages idle until there are enough
for it. Which costs more depends on when sequences end, which nobody knows. So others pass until they took as much as
will then lie idle: the break-even rule of ski rental, which is never far from the better choice.
"""

HASHED_PAGES = 512
"""Once a step has hashed so many pages of sequences that do not fit, the others wait for the next one.

That is a prompt of 8,192 tokens in pages of 16, and takes some milliseconds, where a decode step may take as few. Each
page is hashed once, so all have their turn.
"""


class Admission:
    """Of one step. Waiting sequences are looked at in the order of rank, and later ones pass those that do not fit.

    The pages that a sequence takes to start are counted for each one that it passes (`num_passed_pages`), over the
    whole life of that one, preemptions included. Every start takes a page at least, so from some point on nothing
    behind it starts, and pages that come back are for it and for those before it. All that runs ends, and a sequence
    that nothing runs beside fits. So it starts, unless sequences of higher rank keep coming.
    """

    def __init__(self, pages: SequencePages, running: list[Sequence]) -> None:
        """`running` is looked at anew each time."""
        self._pages = pages
        self._running = running
        self._growth = sum(map(pages.to_grow, running))
        self._passed: list[Sequence] = []
        self._allowance = math.inf  # pages that all of `passed` let others take
        self._num_hashed = 0  # pages of those

    @property
    def is_closed(self) -> bool:
        """Whether nothing can start that takes a page, or a slot for a state, or is to be looked up."""
        no_page = self._allowance < 1 or (bool(self._running) and self._num_free < 1)
        return no_page or not self._pages.has_state or self._num_hashed >= HASHED_PAGES

    def find(self, sequence: Sequence) -> Lookup | None:
        """What `sequence` starts with; None if it has to wait: it lets others pass from here on."""
        lookup, least = sequence.lookup, self._pages.least_to_admit(sequence)
        num_hashed = len(sequence.page_hashes)
        if lookup is None or least is None or self._fits(sequence, lookup, least):
            lookup = self._pages.look_up(sequence)
            if self._fits(sequence, lookup, lookup.num_pages):
                return lookup
        self._num_hashed += len(sequence.page_hashes) - num_hashed
        self.leave(sequence)
        return None

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits on, and lets others pass."""
        lookup = sequence.lookup or self._pages.look_up(sequence)
        self._passed.append(sequence)
        self._allowance = min(self._allowance, PASSING * lookup.num_pages - sequence.num_passed_pages)

    def started(self, sequence: Sequence, num_pages: int) -> None:
        """`sequence` runs, and has its first pages. What it took, `num_pages` in all, passed others."""
        self._growth += self._pages.to_grow(sequence)
        self._allowance -= num_pages
        for passed in self._passed:
            passed.num_passed_pages += num_pages

    @property
    def _num_free(self) -> int:
        """Available pages that running sequences will not need soon."""
        return self._pages.num_available - self._growth

    def _fits(self, sequence: Sequence, lookup: Lookup, num_pages: int) -> bool:
        """Whether all of its tokens find pages, and everything that runs could still grow a while."""
        if num_pages > self._allowance:
            return False
        if not self._running:
            return self._pages.fits_alone(sequence)
        return num_pages + lookup.num_growth <= self._num_free
