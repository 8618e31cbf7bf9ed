"""Which state slots sequences get and give back as their tokens are computed."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.scheduling.page_pool import PagePool
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.state_table import RowStates, StateTable
from penstock.engine.scheduling.step_plan import Row


class SequenceStates:
    """Moves slots between the pool and the tables of running sequences. Of a model without states it moves none.

    A running sequence has one slot that it goes on in, whatever it computes: nobody is preempted for a state. On top of
    that it gets slots that happen to be there: for states at ends of pages, which the prefix cache may give to others
    (at every `state_interval` pages, at the last page that a copy of the prompt could take up, and where the pages of
    this prompt and those of an earlier one parted), and for states behind drafts.

    A state that is to be kept is not written over: the sequence goes on in another slot, and nothing is ever copied. It
    is indexed once the sequence has gone on, or ends: the slot that a sequence is going to write is never another's to
    read.
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
        """Gives a starting sequence its slot. It goes on from the state behind the tokens of `digest`, if it found a
        prefix. `branch` is how many of its pages are there, with their states or without.

        The caller has checked `has_one`.
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
        else:  # it was the only one that nobody held, so nobody else reads it
            self._states.unindex(source)
            table.held[sequence.num_computed] = source

    def release(self, sequence: Sequence) -> None:
        num_hashed = len(sequence.page_hashes) * self._page_size  # to make more could fail, and it has to be let go of
        if not sequence.states.source:  # else it never ran, and its slot has nothing
            for position in sequence.states.held:
                if position <= num_hashed and self._is_known(sequence, position):
                    self._index(sequence, position)
        for slot in sequence.states.slots:
            self._states.release(slot)
        sequence.states = StateTable()

    def room_for_drafts(self, count: int) -> int:
        """How many of so many drafts find a slot each."""
        return min(count, self._states.num_available) if self.are_used else count

    def hold_drafts(self, sequence: Sequence, count: int) -> None:
        """For so many drafts behind its next token; the caller has checked that there is room."""
        if self.are_used:
            self._settle(sequence, sequence.num_computed)
            for number in range(1, count + 1):
                sequence.states.held[sequence.num_computed + 1 + number] = self._states.allocate()

    def route(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """The rows of one plan, whose tokens count as computed, with the states that they read and write."""
        rows = tuple(rows)
        if not self.are_used:
            return rows
        routed = tuple(row._replace(states=self._path(row)) for row in rows)
        for row in rows:  # now that all slots of the step are handed out
            table = row.sequence.states
            if table.source:
                self._states.release(table.source)
                table.source = 0
        return routed

    def index_full(self, sequence: Sequence) -> None:
        """Makes states findable that a sequence has left behind, at ends of pages whose tokens are known."""
        held, now = sequence.states.held, sequence.num_computed
        for position in [position for position in held if position < now and self._is_known(sequence, position)]:
            self._index(sequence, position)
            self._states.release(held.pop(position))

    def check(self, running: Iterable[Sequence]) -> None:
        """Proves that the pool and the tables agree, and that each running sequence has a state to go on from.

        Raises:
            AssertionError: what does not hold.
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
                raise AssertionError(f"no state behind {sequence.num_computed} tokens in {sequence.states.held}")

    def _path(self, row: Row) -> RowStates:
        """Of one row. In several steps of one dispatch it changes its slot once."""
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
        """The slot that a sequence goes on in: that which has its state now, unless this is to be kept and another slot
        is there.
        """
        if self._is_kept(sequence, start) and self._states.num_available:
            return self._states.allocate()
        return sequence.states.held.pop(start)

    def _settle(self, sequence: Sequence, now: int) -> None:
        """Gives back what a sequence needs no more, once its next token is the one at `now`: states behind drafts that
        were wrong, or that others followed.
        """
        held = sequence.states.held
        if len(held) == 1:  # which is the one to go on from
            return
        for other in [other for other in held if other > now or (other < now and not self._is_kept(sequence, other))]:
            self._states.release(held.pop(other))

    def _is_kept(self, sequence: Sequence, position: int) -> bool:
        number, rest = divmod(position, self._page_size)
        if rest or not number or not self._is_caching:
            return False
        return number % self._interval == 0 or number in sequence.states.marks

    def _is_known(self, sequence: Sequence, position: int) -> bool:
        """Whether the state behind so many tokens is to be kept, and is that of tokens which are known."""
        return position <= sequence.num_certain and self._is_kept(sequence, position)

    def _kept_between(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Numbers of tokens, above `start` and below `end`, behind which the state is kept."""
        step, size = self._interval * self._page_size, self._page_size
        if not self._is_caching or end - start == 1:
            return []
        found = {*range(start // step * step, end, step), *(number * size for number in sequence.states.marks)}
        return sorted(position for position in found if start < position < end)

    def _index(self, sequence: Sequence, position: int) -> None:
        """Unless its page can't be found: then nobody gets as far."""
        digest = sequence.page_hash(position // self._page_size - 1, self._page_size)
        if self._pool.has_page(digest):
            self._states.index(sequence.states.held[position], digest)
