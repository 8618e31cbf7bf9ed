"""A kernel's schedule: its loops and what is in them, and how many cycles it takes for given tables.

A bundle is a cycle. What a core waits for, memory above all, is not in a schedule, so cycles are a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from penstock.tools.plan.schedules.bundles import Bundle, Operation, ScheduleError, bundles_of
from penstock.tools.plan.schedules.scalar_unit import ScalarUnit

MAX_CYCLES = 2 * 10**7
_SLOTS, _SLOTS_OF_TPU7X = 4, 6


@dataclass(frozen=True, slots=True)
class Loop:
    first: int  # addresses
    last: int
    depth: int  # 0: in no other
    bundles: int  # if no branch skips any, without inner loops
    spills: int
    fills: int
    transfers: int  # DMAs that it may start
    bounds_checks: int

    def __contains__(self, address: int) -> bool:
        return self.first <= address <= self.last


@dataclass(frozen=True, slots=True)
class Execution:
    """What a kernel does for some tables."""

    executed: tuple[int, ...]  # how often each bundle, by address
    cycles: int
    spills: int
    fills: int
    bounds_checks: int
    transfers: dict[str, int]  # DMAs that were started, by kind such as `hbm_to_vmem`
    transfer_bytes: dict[str, int]

    def trips(self, loop: Loop) -> int:
        """Returns how often a loop's body ran, over all runs of the loop."""
        return self.executed[loop.first]

    def cycles_in(self, loop: Loop) -> int:
        """Returns the cycles of all its trips, including inner loops."""
        return sum(self.executed[loop.first : loop.last + 1])


@dataclass(frozen=True)
class Schedule:
    """A kernel's bundles."""

    name: str
    bundles: tuple[Bundle, ...]

    @classmethod
    def of(cls, name: str, text: str) -> Schedule:
        """Reads a dump. Raises ScheduleError if it is not one."""
        return cls(name, bundles_of(text))

    @cached_property
    def delay_slots(self) -> int:
        """Cycles after a branch in which bundles are executed whether or not it is taken: 4 on v5e and v6e, 6 on TPU7x.

        Those of v5e and v6e are all written, and some region begins right after them. On TPU7x one empty bundle may
        stand for several cycles, so that a region begins sooner; it counts as one.
        """
        starts = self._region_starts
        written = (starts[bisect_right(starts, address)] - address - 1 for address, _ in self._branches)
        fewest = min(written, default=0)
        return fewest if fewest in (0, _SLOTS) else _SLOTS_OF_TPU7X

    @property
    def counts(self) -> Counter[str]:
        """How often its text has a `spill`, a `fill`, a `transfer` and a `bounds check`."""
        return _counted(self.bundles)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, outer ones before those inside them, otherwise by address."""
        spans = {(start, end) for start, end in self._back_branches if end < len(self.bundles)}
        longest = {start: max(end for first, end in spans if first == start) for start, _ in spans}
        ordered = sorted(longest.items())
        return tuple(self._loop(start, end, ordered) for start, end in ordered)

    def run(
        self,
        inputs: Mapping[int, Sequence[int]] | None = None,
        *,
        from_vectors: int | None = None,
        max_cycles: int = MAX_CYCLES,
    ) -> Execution:
        """Follows the schedule for the tables in `inputs`: by their index, the operands that it reads as scalars.

        `from_vectors` is what every scalar that the vector unit makes is taken to be, as the bits of an i32.

        Raises:
            ScheduleError: a branch depends on what is not known, or it takes more than `max_cycles`.
        """
        unit, changes = ScalarUnit(inputs or {}, from_vectors), [0] * (len(self.bundles) + 1)
        address, cycles = 0, 0
        landing, end_of_slots = None, 0  # of a branch that was taken
        while address < len(self.bundles):
            region = unit.run(self.bundles[address]) if address in self._scalar else None
            if region is not None:
                landing, end_of_slots = self._start(region), self._slots_ends[address]
            after = address + 1 if landing is not None else self._next_scalar[address]
            changes[address] += 1
            changes[after] -= 1
            cycles += after - address
            address = after
            if landing is not None and address == end_of_slots:
                address, landing = landing, None
            if cycles > max_cycles:
                raise ScheduleError(f"{self.name} takes more than {max_cycles} cycles, or never ends")
        executed = list(accumulate(changes[:-1]))
        return Execution(
            tuple(executed),
            cycles,
            self._times(executed, lambda operation: operation.is_spill),
            self._times(executed, lambda operation: operation.is_fill),
            self._times(executed, lambda operation: operation.is_bounds_check),
            dict(unit.transfers),
            dict(unit.transfer_bytes),
        )

    def _loop(self, start: int, end: int, spans: Sequence[tuple[int, int]]) -> Loop:
        inner = [(s, e) for s, e in spans if start < s and e <= end]
        own = [b for b in self.bundles[start : end + 1] if not any(s <= b.address <= e for s, e in inner)]
        counts = _counted(own)
        depth = sum(s < start and end <= e for s, e in spans)
        return Loop(
            start, end, depth, len(own), counts["spill"], counts["fill"], counts["transfer"], counts["bounds check"]
        )

    @cached_property
    def _branches(self) -> list[tuple[int, int]]:
        """Addresses of branches, and the regions that they lead to."""
        targets = [(bundle.address, operation.target) for bundle in self.bundles for operation in bundle.operations]
        return [(address, target) for address, target in targets if target is not None]

    @cached_property
    def _back_branches(self) -> list[tuple[int, int]]:
        """First and last address of the body of each branch that goes back."""
        backward = [(self._start(target), address) for address, target in self._branches]
        return [(start, self._slots_ends[address] - 1) for start, address in backward if start <= address]

    @cached_property
    def _region_starts(self) -> list[int]:
        """Addresses at which regions begin, in order, and the end."""
        return sorted({*(bundle.address for bundle in self.bundles if bundle.regions), len(self.bundles)})

    @cached_property
    def _slots_ends(self) -> dict[int, int]:
        """The address after each branch's delay slots, by its own: no region begins among them, none has a branch."""
        starts, slots = self._region_starts, self.delay_slots
        branches = sorted({address for address, _ in self._branches})
        following = [*branches[1:], len(self.bundles)]
        return {
            branch: min(branch + 1 + slots, starts[bisect_right(starts, branch)], after)
            for branch, after in zip(branches, following, strict=True)
        }

    @cached_property
    def _scalar(self) -> frozenset[int]:
        """Addresses of the bundles that the scalar unit has a part in."""
        return frozenset(b.address for b in self.bundles if any(operation.is_scalar for operation in b.operations))

    @cached_property
    def _next_scalar(self) -> list[int]:
        """For each address, that of the next bundle after it that the scalar unit has a part in, or the end."""
        found, following = [0] * len(self.bundles), len(self.bundles)
        for address in reversed(range(len(self.bundles))):
            found[address] = following
            following = address if address in self._scalar else following
        return found

    @cached_property
    def _starts(self) -> dict[int, int]:
        """The first address of each region. One that is empty may be named nowhere: it follows the one before it."""
        empty = {region + 1: bundle.address + 1 for bundle in self.bundles for region in bundle.ends}
        return empty | {region: bundle.address for bundle in reversed(self.bundles) for region in bundle.regions}

    def _start(self, region: int) -> int:
        if region not in self._starts:
            raise ScheduleError(f"{self.name} branches to region {region}, which begins nowhere")
        return self._starts[region]

    def _times(self, executed: Sequence[int], counts: Callable[[Operation], bool]) -> int:
        return sum(
            times * sum(map(counts, bundle.operations)) for times, bundle in zip(executed, self.bundles, strict=True)
        )


def _counted(bundles: Sequence[Bundle]) -> Counter[str]:
    return Counter(kind for bundle in bundles for operation in bundle.operations for kind in _kinds(operation))


def _kinds(operation: Operation) -> list[str]:
    named = {
        "spill": operation.is_spill,
        "fill": operation.is_fill,
        "transfer": operation.is_transfer,
        "bounds check": operation.is_bounds_check,
    }
    return [name for name, holds in named.items() if holds]
