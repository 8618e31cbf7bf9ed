"""Hands state slots to sequences as their tokens are computed, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.memory.state_table import RowStates, StateTable
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row


class SequenceStates:
    """Moves slots between the pool and the tables of running sequences. For a model without states it does nothing.

    A running sequence has one slot that it continues in, whatever it computes: nobody is preempted for a state. It gets
    further slots only if some are free. They serve states after drafts, and states at page ends, which the prefix
    cache may hand to other sequences. Those are kept at every `state_interval` pages, at the last page that a copy of
    the prompt could reuse, and where this prompt's pages diverged from an earlier prompt's.

    A state to be kept is not overwritten: the sequence continues in another slot, and nothing is ever copied. It is
    indexed once the sequence has moved on, or ends, so a slot that a sequence is going to write is never read by
    another.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._states = pool.states
        self._page_size = pool.page_size
        self._interval = pool.state_interval
        self._is_caching = pool.is_caching

    @property
    def are_used(self) -> bool:
        return self._states.num_slots > 0

    @property
    def has_one(self) -> bool:
        """Whether another sequence could start."""
        return not self.are_used or self._states.num_available > 0

    def start(self, sequence: Sequence, digest: bytes | None, branch: int) -> None:
        """Gives a starting sequence its slot; the caller has checked `has_one`.

        If it found a prefix, it continues from the state after the tokens of `digest`. `branch` is the number of its
        pages that were matched, with or without their states.
        """
        if not self.are_used:
            return
        table = sequence.states = StateTable()
        if self._is_caching:
            ends = (sequence.num_prompt - 1, len(sequence.token_ids) - 1)
            table.marks = frozenset({branch, *(end // self._page_size for end in ends)})
        source = 0 if digest is None else self._states.find(digest)
        if not source:
            table.held[sequence.num_computed] = self._states.allocate()
            return
        self._states.acquire(source)
        if self._states.num_available:
            table.source, table.held[sequence.num_computed] = source, self._states.allocate()
        else:  # it was the only slot that nobody held, so nobody else reads it
            self._states.unindex(source)
            table.held[sequence.num_computed] = source

    def release(self, sequence: Sequence) -> None:
        num_hashed = len(sequence.page_hashes) * self._page_size  # hashing more could fail; a release must not
        if not sequence.states.source:  # otherwise it never ran, and its slot is empty
            for position in sequence.states.held:
                if position <= num_hashed and self._is_known(sequence, position):
                    self._index(sequence, position)
        for slot in sequence.states.slots:
            self._states.release(slot)
        sequence.states = StateTable()

    def room_for_drafts(self, count: int) -> int:
        """Returns how many of `count` drafts get a slot each."""
        return min(count, self._states.num_available) if self.are_used else count

    def hold_drafts(self, sequence: Sequence, count: int) -> None:
        """Takes slots for `count` drafts after the next token; the caller has checked that there is room."""
        if self.are_used:
            self._settle(sequence, sequence.num_computed)
            for number in range(1, count + 1):
                sequence.states.held[sequence.num_computed + 1 + number] = self._states.allocate()

    def route(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Returns the rows of one plan, whose tokens count as computed, with the states that they read and write."""
        rows = tuple(rows)
        if not self.are_used:
            return rows
        routed = tuple(row._replace(states=self._path(row)) for row in rows)
        for row in rows:  # only after all slots of the step are handed out
            table = row.sequence.states
            if table.source:
                self._states.release(table.source)
                table.source = 0
        return routed

    def index_full(self, sequence: Sequence) -> None:
        """Indexes states that a sequence has moved past, at page ends whose tokens are known."""
        held, now = sequence.states.held, sequence.num_computed
        for position in [position for position in held if position < now and self._is_known(sequence, position)]:
            self._index(sequence, position)
            self._states.release(held.pop(position))

    def check(self, running: Iterable[Sequence]) -> None:
        """Checks that the pool and the tables agree, and that each running sequence has a state to continue from.

        Raises:
            AssertionError: an invariant does not hold.
        """
        running = tuple(running)
        slots = [slot for sequence in running for slot in sequence.states.slots]
        if len(slots) != self._states.num_references:
            raise AssertionError(f"sequences hold {slots}, the pool counts {self._states.num_references} references")
        written = [slot for sequence in running for slot in sequence.states.held.values()]
        if len(set(written)) != len(written):
            raise AssertionError(f"a state slot is written by two: {written}")
        for sequence in running if self.are_used else ():
            if sequence.num_computed not in sequence.states.held:
                raise AssertionError(f"no state after {sequence.num_computed} tokens in {sequence.states.held}")

    def _path(self, row: Row) -> RowStates:
        """Returns the states of one row. In several steps of one dispatch it changes its slot at most once."""
        sequence, start = row.sequence, row.start
        held, num_drafts = sequence.states.held, len(row.drafts)
        end = start + row.num_tokens - num_drafts + max(0, row.num_sampled - 1)
        if not num_drafts:
            self._settle(sequence, start)
        read = sequence.states.source or held[start]
        own = held.pop(start) if sequence.states.source else self._writable(sequence, start)
        writes = []
        kept = self._kept_between(sequence, start, end)
        for position in kept[:1] if row.num_sampled > 1 else kept:
            if not self._states.num_available:
                break
            held[position] = self._states.allocate()
            writes.append((position - start, held[position]))
        held[end] = own
        behind = [(end + number - start, held[end + number]) for number in range(num_drafts + 1)]
        return RowStates(read, (*writes, *behind))

    def _writable(self, sequence: Sequence, start: int) -> int:
        """Returns the slot to continue in: the current one, unless that must be kept and another is available."""
        if self._is_kept(sequence, start) and self._states.num_available:
            return self._states.allocate()
        return sequence.states.held.pop(start)

    def _settle(self, sequence: Sequence, now: int) -> None:
        """Releases the states that a sequence no longer needs once its next token is the one at `now`.

        These are states after drafts that were wrong, or that others followed.
        """
        held = sequence.states.held
        if len(held) == 1:  # the one to continue from
            return
        for other in [other for other in held if other > now or (other < now and not self._is_kept(sequence, other))]:
            self._states.release(held.pop(other))

    def _is_kept(self, sequence: Sequence, position: int) -> bool:
        number, rest = divmod(position, self._page_size)
        if rest or not number or not self._is_caching:
            return False
        return number % self._interval == 0 or number in sequence.states.marks

    def _is_known(self, sequence: Sequence, position: int) -> bool:
        """Whether the state after `position` tokens should be kept, and all these tokens are known."""
        return position <= sequence.num_certain and self._is_kept(sequence, position)

    def _kept_between(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Returns the token counts between `start` and `end`, both excluded, after which the state is kept."""
        step, size = self._interval * self._page_size, self._page_size
        if not self._is_caching or end - start == 1:
            return []
        found = {*range(start // step * step, end, step), *(number * size for number in sequence.states.marks)}
        return sorted(position for position in found if start < position < end)

    def _index(self, sequence: Sequence, position: int) -> None:
        """Indexes a state, unless its page is not indexed: then no look-up gets that far."""
        digest = sequence.page_hash(position // self._page_size - 1, self._page_size)
        if self._pool.has_page(digest):
            self._states.index(sequence.states.held[position], digest)
