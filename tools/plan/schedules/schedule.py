"""A kernel's schedule: its loops and what is in them, and how many cycles it takes for given tables.

A bundle is a cycle. What a core waits for, memory above all, is not in a schedule, so cycles are a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.tools.plan.schedules.bundles import Bundle, Operation, ScheduleError, bundles_of
from penstock.tools.plan.schedules.scalar_unit import ScalarUnit

MAX_CYCLES = 2 * 10**7


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
        """Bundles after a branch that are executed whether or not it is taken: 4 on v5e and v6e, 1 on TPU7x.

        Regions never begin among them, and some region begins right after them.
        """
        starts = sorted({*(bundle.address for bundle in self.bundles if bundle.regions), len(self.bundles)})
        branches = [bundle.address for bundle in self.bundles if any(op.target for op in bundle.operations)]
        return min((starts[bisect_right(starts, address)] - address - 1 for address in branches), default=0)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Outer ones before those in them, otherwise by address."""
        spans = {(start, end) for start, end in self._back_branches if end < len(self.bundles)}
        longest = {start: max(end for first, end in spans if first == start) for start, _ in spans}
        ordered = sorted(longest.items())
        return tuple(self._loop(start, end, ordered) for start, end in ordered)

    def run(self, inputs: Mapping[int, Sequence[int]] | None = None, *, max_cycles: int = MAX_CYCLES) -> Execution:
        """Follows the schedule for the tables in `inputs`: by their index, the operands that it reads as scalars.

        Raises:
            ScheduleError: a branch depends on what is not known, or it takes more than `max_cycles`.
        """
        unit, executed = ScalarUnit(inputs or {}), [0] * len(self.bundles)
        address, landing, cycles = 0, None, 0
        countdown = 0
        while address < len(self.bundles):
            cycles += 1
            if cycles > max_cycles:
                raise ScheduleError(f"{self.name} takes more than {max_cycles} cycles, or never ends")
            executed[address] += 1
            if address in self._scalar:
                region = unit.run(self.bundles[address])
                if region is not None:
                    landing, countdown = self._start(region), self.delay_slots + 1
            address += 1
            if landing is not None:
                countdown -= 1
                if countdown == 0:
                    address, landing = landing, None
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
        counts = Counter(kind for bundle in own for operation in bundle.operations for kind in _kinds(operation))
        depth = sum(s < start and end <= e for s, e in spans)
        return Loop(
            start, end, depth, len(own), counts["spill"], counts["fill"], counts["transfer"], counts["bounds check"]
        )

    @cached_property
    def _back_branches(self) -> list[tuple[int, int]]:
        """First and last address of the body of each branch that goes back."""
        branches = [(bundle.address, op.target) for bundle in self.bundles for op in bundle.operations if op.target]
        spans = [(self._start(target), address + self.delay_slots) for address, target in branches]
        return [(start, end) for start, end in spans if start <= end - self.delay_slots]

    @cached_property
    def _scalar(self) -> frozenset[int]:
        """Addresses of the bundles that the scalar unit has a part in."""
        return frozenset(
            bundle.address for bundle in self.bundles if any(_is_scalar(operation) for operation in bundle.operations)
        )

    @cached_property
    def _starts(self) -> dict[str, int]:
        return {region: bundle.address for bundle in reversed(self.bundles) for region in bundle.regions}

    def _start(self, region: str) -> int:
        if region not in self._starts:
            raise ScheduleError(f"{self.name} branches to region {region}, which begins nowhere")
        return self._starts[region]

    def _times(self, executed: Sequence[int], counts: Callable[[Operation], bool]) -> int:
        return sum(
            times * sum(map(counts, bundle.operations)) for times, bundle in zip(executed, self.bundles, strict=True)
        )


def _kinds(operation: Operation) -> list[str]:
    named = {
        "spill": operation.is_spill,
        "fill": operation.is_fill,
        "transfer": operation.is_transfer,
        "bounds check": operation.is_bounds_check,
    }
    return [name for name, holds in named.items() if holds]


def _is_scalar(operation: Operation) -> bool:
    if operation.result is not None:
        return operation.result[1] in "sp"
    return operation.target is not None or operation.opcode == "sst" or operation.is_transfer
