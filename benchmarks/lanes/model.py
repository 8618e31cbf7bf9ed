"""A model of the lanes: the order in which `take` gives entries out, without a server.

It implements docs/lanes.md on plain data. A test replays random traces through it and through the scripts, and finds
the same entries in the same order and the same accounts (`tests/protocol/scripts/test_lane_model.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

SPAN = 2**42
PATIENCE_MS, AGED_MS = 60_000, 5_000
AGAIN_MS = 1_600_000_000_000  # entries that a worker has had are due earlier by this much
MAX_OVERTAKES = 20
AT_ONCE = 64
MAX_BANDS = 16
CREDIT = 8192


class EntryId(NamedTuple):
    """Sorts like the server's ids."""

    ms: int
    number: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting entry."""

    id: EntryId
    tenant: str
    priority: int = 0
    timeout_s: float | None = None
    cost: int = 1  # charged to the tenant when it is taken

    @property
    def rank(self) -> int:
        return (1000 - self.priority) * SPAN + self._due_ms

    @property
    def rank_again(self) -> int:
        """Rank once a worker has had the entry."""
        return (1000 - self.priority) * SPAN + max(0, self._due_ms - AGAIN_MS)

    @property
    def _due_ms(self) -> int:
        return self.id.ms + (PATIENCE_MS if self.timeout_s is None else int(1000 * self.timeout_s))


@dataclass(slots=True)
class _Chooser:
    """A tenant that may be next, in one run."""

    name: str
    counter: float
    is_looked_at: bool = False
    is_done: bool = False
    chosen: list[Waiting] = field(default_factory=list)


class Lanes:
    """The waiting entries, and what tenants have been served."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.floor = 0.0  # served to the last tenant that left
        self.charged: dict[EntryId, float] = {}
        self.service: dict[str, float] = {}  # of tenants that do not wait
        self.counters: dict[str, float] = {}  # of tenants that wait
        self.seats: dict[str, int] = {}  # the priority of each tenant's next entry
        self._waiting: dict[EntryId, Waiting] = {}
        self._by_age: list[EntryId] = []  # a heap; entries that have left stay until they come up
        self._lanes: dict[str, list[tuple[int, int, int]]] = {}  # heaps too
        self._bands: dict[int, list[tuple[float, str]]] = {}  # heaps too
        self._sizes: dict[int, int] = {}  # of bands
        self._forgettable: list[tuple[float, str]] = []  # `service` as a heap, with stale entries too
        self._overtakes = (EntryId(0, 0), 0)  # the oldest entry that has waited for long, and its overtakes so far

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> EntryId | None:
        while self._by_age and self._by_age[0] not in self._waiting:
            heappop(self._by_age)
        return self._by_age[0] if self._by_age else None

    def arrive(self, entry: Waiting) -> None:
        """Gives an entry its place. Entries come in the order of their ids."""
        self._wait(entry, entry.rank)

    def give_back(self, entry: Waiting) -> None:
        """Makes an entry that was taken wait again. It keeps its charge."""
        self._wait(entry, entry.rank_again)

    def _wait(self, entry: Waiting, rank: int) -> None:
        before = self._priority_next(entry.tenant)
        self._waiting[entry.id] = entry
        heappush(self._by_age, entry.id)
        heappush(self._lanes.setdefault(entry.tenant, []), (rank, entry.id.number, entry.id.ms))
        if before is None or entry.priority > before:
            self._seat(entry.tenant, before, entry.priority)

    def take(self, count: int, now_ms: int = 0, *, max_overtakes: int = MAX_OVERTAKES) -> list[Waiting]:
        """Takes the next entries, in order."""
        taken: list[Waiting] = []
        aged = self.oldest if count > 0 else None
        if aged is not None and now_ms - aged.ms <= AGED_MS:
            aged = None
        overtakes = self._overtakes[1] if aged is not None and aged == self._overtakes[0] else 0
        if aged is not None and overtakes >= max_overtakes:
            taken.append(self._take_out(aged))
        while len(taken) < count and self._sizes:
            taken += self._take_from(max(self._sizes), min(count - len(taken), AT_ONCE))
        if aged is not None and aged in self._waiting:
            self._overtakes = (aged, overtakes + len(taken))
        return taken

    def charge(self, totals: Iterable[tuple[EntryId, str, float]]) -> None:
        """Sets the total cost of running entries."""
        added: dict[str, float] = {}
        for entry, tenant, total in totals:
            added[tenant] = added.get(tenant, 0) + total - self.charged.get(entry, 0)
            self.charged[entry] = total
        for tenant, tokens in added.items():
            self._serve(tenant, tokens)

    def settle(self, entry: EntryId, tenant: str, total: float) -> None:
        """Charges an entry that has ended, and forgets it."""
        self.charge([(entry, tenant, total)])
        del self.charged[entry]

    def _take_from(self, band: int, room: int) -> list[Waiting]:
        tenants = [_Chooser(name, self.counters[name]) for name in self._first(band, room)]
        chosen: list[Waiting] = []
        while len(chosen) < room and (tenant := _least(tenants)) is not None:
            tenant.is_looked_at = True
            entry = self._next(tenant.name)
            if entry is None or entry.priority != band:
                tenant.is_done = True
                continue
            heappop(self._lanes[tenant.name])
            del self._waiting[entry.id]
            tenant.counter += entry.cost / self._weight(tenant.name)
            chosen.append(entry)
            tenant.chosen.append(entry)
        for tenant in tenants:
            for entry in tenant.chosen:
                if entry.id in self.charged:  # it was taken before
                    tenant.counter -= entry.cost / self._weight(tenant.name)
                self.charged.setdefault(entry.id, entry.cost)
            if tenant.is_looked_at:
                now = self._priority_next(tenant.name)
                if now == band:
                    self._set(tenant.name, band, tenant.counter)
                else:
                    self._seat(tenant.name, band, now, tenant.counter)
        return chosen

    def _take_out(self, entry_id: EntryId) -> Waiting:
        """Takes an entry out of turn."""
        entry = self._waiting[entry_id]
        before = self._priority_next(entry.tenant)
        del self._waiting[entry_id]
        self._seat(entry.tenant, before, self._priority_next(entry.tenant))
        if entry_id not in self.charged:
            self.charged[entry_id] = entry.cost
            self._serve(entry.tenant, entry.cost)
        return entry

    def _first(self, band: int, count: int) -> list[str]:
        """Returns tenants of a band, the least served first."""
        heap, found = self._bands[band], []
        names: list[str] = []
        while heap and len(names) < count:
            counter, name = heappop(heap)
            if self.seats.get(name) == band and self.counters[name] == counter and name not in names:
                names.append(name)
                found.append((counter, name))
        for each in found:
            heappush(heap, each)
        return names

    def _next(self, tenant: str) -> Waiting | None:
        lane = self._lanes.get(tenant)
        while lane:
            entry = self._waiting.get(EntryId(lane[0][2], lane[0][1]))
            if entry is not None:
                return entry
            heappop(lane)
        self._lanes.pop(tenant, None)
        return None

    def _priority_next(self, tenant: str) -> int | None:
        entry = self._next(tenant)
        return None if entry is None else entry.priority

    def _seat(self, tenant: str, before: int | None, now: int | None, counter: float | None = None) -> None:
        if before == now:
            return
        if before is not None:
            counter = self.counters.pop(tenant) if counter is None else counter
            self.counters.pop(tenant, None)
            del self.seats[tenant]
            self._sizes[before] -= 1
            if not self._sizes[before]:
                del self._sizes[before], self._bands[before]
            if now is not None and now > before and (least := self._least(now)) is not None:
                counter = max(counter, least - CREDIT)
        if now is not None:
            counter = self._lifted(tenant, now) if counter is None else counter
            self._sizes[now] = self._sizes.get(now, 0) + 1
            self.seats[tenant] = now
            self._set(tenant, now, counter)
        elif counter is not None:
            self._set_service(tenant, counter)
            self.floor = max(self.floor, counter)

    def _lifted(self, tenant: str, priority: int) -> float:
        """Returns a returning tenant's service: no less than that of those who stayed."""
        had = self.service.pop(tenant, 0.0)
        lowest = self._least_of_all()
        if len(self._sizes) <= MAX_BANDS:
            self._forget_below(self._base(lowest))
        least_here = self._least(priority)
        return max(had, self._base(lowest if least_here is None else least_here))

    def _base(self, lowest: float | None) -> float:
        """Returns the least service that a tenant comes back with, given the least among waiting tenants."""
        return self.floor if lowest is None else max(0.0, lowest - CREDIT)

    def _least_of_all(self) -> float | None:
        """Returns the least service of waiting tenants; None: nobody waits."""
        found = [self._least(band) for band in sorted(self._sizes)[:MAX_BANDS]]
        return min((each for each in found if each is not None), default=None)

    def _least(self, band: int) -> float | None:
        heap = self._bands.get(band, [])
        while heap and not (self.seats.get(heap[0][1]) == band and self.counters[heap[0][1]] == heap[0][0]):
            heappop(heap)
        return heap[0][0] if heap else None

    def _forget_below(self, lowest: float) -> None:
        while self._forgettable and self._forgettable[0][0] < lowest:
            counter, tenant = heappop(self._forgettable)
            if self.service.get(tenant) == counter:
                del self.service[tenant]

    def _serve(self, tenant: str, tokens: float) -> None:
        if tokens == 0:
            return
        more = tokens / self._weight(tenant)
        if tenant in self.seats:
            self._set(tenant, self.seats[tenant], self.counters[tenant] + more)
        else:
            known = self.service.get(tenant)
            self._set_service(tenant, (self._base(self._least_of_all()) if known is None else known) + more)

    def _set(self, tenant: str, band: int, counter: float) -> None:
        self.counters[tenant] = counter
        heappush(self._bands.setdefault(band, []), (counter, tenant))

    def _set_service(self, tenant: str, counter: float) -> None:
        self.service[tenant] = counter
        heappush(self._forgettable, (counter, tenant))

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


def _least(tenants: list[_Chooser]) -> _Chooser | None:
    """Returns the least served tenant; among equals, the one that was least served before.

    After the first tenant that was not looked at, nobody has had less.
    """
    found: _Chooser | None = None
    for each in tenants:
        if not each.is_done and (found is None or each.counter < found.counter):
            found = each
        if not each.is_looked_at:
            break
    return found
