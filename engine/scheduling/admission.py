"""Decides which waiting sequences may start: in order of rank, but small ones may pass those that do not fit."""

from __future__ import annotations

import math
from operator import gt, sub

from penstock.engine.scheduling.memory.amounts import NOTHING, Amount
from penstock.engine.scheduling.memory.lookup import Lookup
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.sequence_pages import SequencePages

PASSING = 1
"""Sequences behind one that waits for pages may take this many times the pages that it needs to start.

Letting them pass may delay it, but only through the kinds of pages that it lacks; other kinds they may take freely.
Holding them back leaves pages idle until there are enough for it. Which costs more depends on when sequences end, which
is unknown. So others pass until they have taken as many pages as would then lie idle. This is the break-even rule of
ski rental, which is never far from the better choice.
"""

HASHED_PAGES = 512
"""Once a step has hashed this many pages of sequences that do not fit, the others wait for the next step.

That is a prompt of 8,192 tokens in pages of 16, and takes some milliseconds; a decode step may be as short. Each page
is hashed once, so all sequences get their turn.
"""


class Admission:
    """Admission in one step. Waiting sequences are tried in order of rank; later ones may pass those that do not fit.

    The pages that a sequence takes to start are charged to each sequence that it passes (`num_passed_pages`), over the
    passed sequence's whole life, preemptions included. Every start takes at least a page of each kind, so from some
    point on nothing behind a waiting sequence starts, and freed pages go to it and to those before it. All running
    sequences end, and a sequence alone always fits. So it starts, unless sequences of higher rank keep coming.
    """

    def __init__(self, pages: SequencePages, running: list[Sequence]) -> None:
        """Reads `running` again at each call."""
        self._pages = pages
        self._running = running
        self._growth = sum(map(pages.to_grow, running), NOTHING)
        self._passed: list[Sequence] = []
        # Pages of each kind that all sequences in `_passed` still let others take.
        self._allowance = [math.inf] * len(pages.available.counts)
        self._num_hashed = 0  # pages hashed for sequences that do not fit

    @property
    def is_closed(self) -> bool:
        """Whether no sequence that needs a page, a state slot or a look-up can start any more."""
        no_page = min(self._allowance) < 1 or (bool(self._running) and min(self._free.counts) < 1)
        return no_page or not self._pages.has_state or self._num_hashed >= HASHED_PAGES

    def find(self, sequence: Sequence) -> Lookup | None:
        """Returns what `sequence` starts with. Returns None if it has to wait; then others may pass it."""
        lookup, least = sequence.lookup, self._pages.least_to_admit(sequence)
        num_hashed = len(sequence.page_hashes)
        if lookup is None or least is None or self._fits(sequence, lookup, least):
            lookup = self._pages.look_up(sequence)
            if self._fits(sequence, lookup, lookup.num_pages):
                return lookup
        self._leave(sequence, num_hashed)
        return None

    def leave(self, sequence: Sequence) -> None:
        """Leaves `sequence` waiting and lets others pass."""
        self._leave(sequence, len(sequence.page_hashes))

    def _leave(self, sequence: Sequence, num_hashed: int) -> None:
        """Leaves `sequence` waiting; `num_hashed` of its pages had been hashed before."""
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
        """Notes that `sequence` runs with its first pages. All `num_pages` that it took count as passing others."""
        self._growth += self._pages.to_grow(sequence)
        self._allowance = list(map(sub, self._allowance, num_pages.counts))
        for passed in self._passed:
            passed.num_passed_pages += num_pages

    @property
    def _free(self) -> Amount:
        """Available pages that running sequences will not need soon."""
        return self._pages.available - self._growth

    def _fits(self, sequence: Sequence, lookup: Lookup, num_pages: Amount) -> bool:
        """Whether `num_pages` are there and every running sequence could still grow for a while."""
        if any(map(gt, num_pages.counts, self._allowance)):
            return False
        if not self._running:
            return self._pages.fits_alone(sequence)
        return (num_pages + lookup.num_growth).fits(self._free)
