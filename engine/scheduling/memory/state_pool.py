"""Tracks who holds which state slot, and which states can serve other sequences with the same prefix."""

from __future__ import annotations

from collections import OrderedDict, deque


class StatePool:
    """Slots for recurrent states. A state summarizes all tokens of a sequence in a fixed size.

    Like page 0, slot 0 is the sink: it is never handed out. Every other slot is in exactly one of three conditions:
    held (one or more references), cached (no reference, but indexed), or free. An indexed slot has the state after the
    tokens that its hash stands for, and is not written while it is indexed. The pool of a model without such layers has
    no slots, and no sequence asks for one.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots` includes the sink; 0 means no slots at all."""
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(1, num_slots))
        self._references = [0] * num_slots
        self._key_of: dict[int, bytes] = {}  # indexed slot -> hash of the tokens that its state follows
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
        """The hashes of all indexed states."""
        return frozenset(self._slot_of)

    def allocate(self) -> int:
        """Hands out a slot, evicting the least recently used cached state if none is free.

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
        """Drops one reference."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            if slot in self._key_of:
                self._cached[slot] = None
            else:
                self._free.append(slot)

    def find(self, digest: bytes) -> int:
        """Returns the slot with the state after these tokens, or 0 if there is none."""
        return self._slot_of.get(digest, 0)

    def index(self, slot: int, digest: bytes) -> None:
        """Indexes the state in a held slot, unless another slot already has it."""
        if digest not in self._slot_of:
            self._slot_of[digest] = slot
            self._key_of[slot] = digest

    def unindex(self, slot: int) -> None:
        """Removes a slot from the index: it may then be written, and becomes free if nobody holds it."""
        digest = self._key_of.pop(slot, None)
        if digest is not None:
            del self._slot_of[digest]
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def forget(self, digest: bytes) -> None:
        """Drops the state after these tokens: one of their pages is gone, so it has no more use."""
        if digest in self._slot_of:
            self.unindex(self._slot_of[digest])

    def forget_contents(self) -> None:
        """Drops the whole index after the slots' content was lost. Held slots stay held."""
        for slot in list(self._key_of):
            self.unindex(slot)

    def check(self) -> None:
        """Checks the pool's invariants: every slot is in exactly one condition, the index is a bijection.

        Raises:
            AssertionError: an invariant does not hold.
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
