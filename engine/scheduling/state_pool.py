"""Who holds which state slot, and which states can serve another sequence with the same prefix."""

from __future__ import annotations

from collections import OrderedDict, deque


class StatePool:
    """Slots for recurrent states: what layers keep of all of a sequence's tokens together, of one size however many.

    Slot 0 is the sink, as page 0 is: it is never handed out. Every other slot is in exactly one of three conditions:
    held (one or more references), cached (no reference, but indexed), or free. An indexed slot has the state behind the
    tokens that its hash stands for, and nothing is written to it while it is indexed. A pool of a model without such
    layers has no slots, and no sequence asks it for one.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots` counts the sink; 0 for none at all."""
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(1, num_slots))
        self._references = [0] * num_slots
        self._key_of: dict[int, bytes] = {}  # indexed slot -> hash of the tokens behind which its state is
        self._slot_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Slots that `allocate` could hand out now, cached ones included."""
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

    @property
    def indexed(self) -> frozenset[bytes]:
        """The hashes of all states that can be found."""
        return frozenset(self._slot_of)

    def allocate(self) -> int:
        """Hands out a slot, for which the least recently used cached state goes if none is free.

        Raises:
            AssertionError: none is available; the caller has checked that.
        """
        if not self.num_available:
            raise AssertionError(f"a state slot asked for, all {self.num_slots - 1} are held")
        if not self._free:
            self.unindex(next(iter(self._cached)))
        slot = self._free.popleft()
        self._references[slot] = 1
        return slot

    def acquire(self, slot: int) -> None:
        """Takes a reference to an indexed slot."""
        self._references[slot] += 1
        self._cached.pop(slot, None)

    def release(self, slot: int) -> None:
        """Gives up one reference."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            if slot in self._key_of:
                self._cached[slot] = None
            else:
                self._free.append(slot)

    def find(self, digest: bytes) -> int:
        """The slot with the state behind these tokens; 0 if there is none."""
        return self._slot_of.get(digest, 0)

    def index(self, slot: int, digest: bytes) -> None:
        """Makes the state in a held slot findable, unless another slot has it already."""
        if digest not in self._slot_of:
            self._slot_of[digest] = slot
            self._key_of[slot] = digest

    def unindex(self, slot: int) -> None:
        """Takes a slot out of the index: it may be written to, and is free if nobody holds it."""
        digest = self._key_of.pop(slot, None)
        if digest is not None:
            del self._slot_of[digest]
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def forget(self, digest: bytes) -> None:
        """What is behind these tokens is of no more use: one of their pages is gone."""
        if digest in self._slot_of:
            self.unindex(self._slot_of[digest])

    def forget_contents(self) -> None:
        """Drops the whole index, for when what the slots hold was lost. Held slots stay held."""
        for slot in list(self._key_of):
            self.unindex(slot)

    def check(self) -> None:
        """Proves the pool's invariants: every slot is in exactly one condition, the index is a bijection.

        Raises:
            AssertionError: what does not hold.
        """
        held = [slot for slot, count in enumerate(self._references) if count > 0]
        if sorted([*self._free, *self._cached, *held]) != list(range(1, self.num_slots)):
            raise AssertionError(
                f"free {len(self._free)} + cached {len(self._cached)} + held {len(held)} state slots are not the "
                f"{self.num_slots - 1} there are, each once"
            )
        if min(self._references, default=0) < 0:
            raise AssertionError(f"negative reference count of a state slot: {self._references}")
        if {slot: digest for digest, slot in self._slot_of.items()} != self._key_of:
            raise AssertionError("the two directions of the index of states differ")
        if not set(self._cached) <= set(self._key_of):
            raise AssertionError(f"state slots cached but not indexed: {set(self._cached) - set(self._key_of)}")
        if set(self._free) & set(self._key_of):
            raise AssertionError(f"state slots free but indexed: {set(self._free) & set(self._key_of)}")
