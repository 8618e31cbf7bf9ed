"""Which waiting sequences may start: in the order of rank, but small ones do not wait behind what does not fit."""

from __future__ import annotations

import math
from operator import gt, sub

from penstock.engine.scheduling.amounts import NOTHING, Amount
from penstock.engine.scheduling.lookup import Lookup
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.sequence_pages import SequencePages

PASSING = 1
"""Those behind a sequence that waits for pages may take so many times the pages that it needs to start.

Letting them pass may delay it, by the pages that they hold, of those kinds that it lacks: others they may take as they
like. Holding them back leaves pages idle until there are enough
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
    whole life of that one, preemptions included. Every start takes a page of each kind at least, so from some point on
    nothing behind it starts, and pages that come back are for it and for those before it. All that runs ends, and a
    sequence that nothing runs beside fits. So it starts, unless sequences of higher rank keep coming.
    """

    def __init__(self, pages: SequencePages, running: list[Sequence]) -> None:
        """`running` is looked at anew each time."""
        self._pages = pages
        self._running = running
        self._growth = sum(map(pages.to_grow, running), NOTHING)
        self._passed: list[Sequence] = []
        # Pages of each kind that all of `passed` let others take.
        self._allowance = [math.inf] * len(pages.available.counts)
        self._num_hashed = 0  # pages of those

    @property
    def is_closed(self) -> bool:
        """Whether nothing can start that takes a page, or a slot for a state, or is to be looked up."""
        no_page = min(self._allowance) < 1 or (bool(self._running) and min(self._free.counts) < 1)
        return no_page or not self._pages.has_state or self._num_hashed >= HASHED_PAGES

    def find(self, sequence: Sequence) -> Lookup | None:
        """What `sequence` starts with; None if it has to wait: it lets others pass from here on."""
        lookup, least = sequence.lookup, self._pages.least_to_admit(sequence)
        num_hashed = len(sequence.page_hashes)
        if lookup is None or least is None or self._fits(sequence, lookup, least):
            lookup = self._pages.look_up(sequence)
            if self._fits(sequence, lookup, lookup.num_pages):
                return lookup
        self._leave(sequence, num_hashed)
        return None

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits on, and lets others pass."""
        self._leave(sequence, len(sequence.page_hashes))

    def _leave(self, sequence: Sequence, num_hashed: int) -> None:
        """`num_hashed` of its pages were hashed before it was looked at."""
        lookup = sequence.lookup or self._pages.look_up(sequence)
        self._num_hashed += len(sequence.page_hashes) - num_hashed
        self._passed.append(sequence)
        wanted, passed = lookup.num_pages + lookup.num_growth, sequence.num_passed_pages.counts
        kinds = range(len(self._allowance))
        lacking = [kind for kind in kinds if wanted.counts[kind] > self._free.counts[kind]]
        for kind in lacking or kinds:
            left = PASSING * lookup.num_pages.counts[kind] - (passed[kind] if passed else 0)
            self._allowance[kind] = min(self._allowance[kind], left)

    def started(self, sequence: Sequence, num_pages: Amount) -> None:
        """`sequence` runs, and has its first pages. What it took, `num_pages` in all, passed others."""
        self._growth += self._pages.to_grow(sequence)
        self._allowance = list(map(sub, self._allowance, num_pages.counts))
        for passed in self._passed:
            passed.num_passed_pages += num_pages

    @property
    def _free(self) -> Amount:
        """Available pages that running sequences will not need soon."""
        return self._pages.available - self._growth

    def _fits(self, sequence: Sequence, lookup: Lookup, num_pages: Amount) -> bool:
        """Whether all of its tokens find pages, and everything that runs could still grow a while."""
        if any(map(gt, num_pages.counts, self._allowance)):
            return False
        if not self._running:
            return self._pages.fits_alone(sequence)
        return (num_pages + lookup.num_growth).fits(self._free)
