"""Simulates a fleet of thousands of workers on a virtual clock; the model of the lanes decides the order.

Slots, lengths, deaths and prefix caches are simulated, and entries are taken as in `model.Lanes`. A worker takes an
entry whenever one of its slots is free. Redis and the delivery of tokens take no time. Running requests are charged
every 10 s; real workers do so every second.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Literal

from benchmarks.lanes.model import EntryId, Lanes, Waiting
from benchmarks.lanes.traffic import NO_HOME, Size, Traffic

Homes = Literal["none", "if free", "patient"]
"""Workers that get a new entry while there is room. "none": the worker that has waited longest. "if free": its home, if
that has room. "patient": the same, but it waits for a full home until others may take it.
"""

CHARGE_S = 10
OUTPUT_WEIGHT = 2
TAKEOVER_S = 11.0  # life of a heartbeat, and half a scan
SAMPLE_S = 1.0


class Fifo:
    """First in, first out, like a stream without lanes."""

    oldest: EntryId | None = None

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(self, entry: Waiting) -> None:
        self._waiting.append(entry)

    def give_back(self, entry: Waiting) -> None:
        self._waiting.appendleft(entry)

    def take(self, count: int, now_ms: int = 0) -> list[Waiting]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]


@dataclass(slots=True)
class Worker:
    free: int
    is_alive: bool = True
    is_listed: bool = True  # whether it is among those that wait for entries
    running: set[int] = field(default_factory=set)
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    own: deque[int] = field(default_factory=deque)  # entries that wait for this worker, as their home


@dataclass(slots=True)
class Run:
    """A request that was begun."""

    worker: int
    begun_s: float
    first_s: float  # when its first token is ready
    end_s: float
    num_left: int  # remaining tokens


class Simulation:
    """Plays traffic once. The findings are in its attributes."""

    def __init__(
        self, size: Size, traffic: Traffic, *, homes: Homes = "none", is_fair: bool = True, steal_s: float = 1.0,
        deaths: dict[float, float] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.size, self.traffic, self.homes, self.steal_s = size, traffic, homes, steal_s
        self.lanes: Lanes | None = Lanes() if is_fair else None
        self.queue: Lanes | Fifo = Fifo() if self.lanes is None else self.lanes  # an empty queue is false
        self.deaths = deque(sorted((deaths or {}).items()))  # when, and which share of the fleet
        self.random = Random(seed)
        self.workers = [Worker(size.slots) for _ in range(size.workers)]
        self.ready = deque(range(size.workers))  # workers with a free slot, in the order in which they began to wait
        self.waits_s = [-1.0] * len(traffic)  # until a worker took the request
        self.resumed_s: list[float] = []  # from a death to the takeover
        self.calls: Counter[str] = Counter()
        self.hits, self.num_begun_alike = 0, 0
        self.busy_s = 0.0
        self.longest_queue = 0
        self.samples: list[tuple[float, dict[str, float], dict[str, int]]] = []
        self._runs: dict[int, Run] = {}
        self._events: list[tuple[float, int, str]] = []  # when, which request, what
        self.orphans: dict[int, float] = {}  # requests that wait again, and when their workers died
        self._stolen: set[int] = set()  # requests at which their homes need not look any more
        self._wheel: list[list[int]] = [[] for _ in range(CHARGE_S)]
        self._now_s = 0.0

    def run(self) -> None:
        traffic, place, next_second = self.traffic, 0, 1
        while self._now_s < self.size.seconds:
            arrival_s = traffic.at_s[place] if place < len(traffic) else self.size.seconds
            event_s = self._events[0][0] if self._events else self.size.seconds
            self._now_s = min(arrival_s, event_s)
            while self._now_s >= next_second and next_second <= self.size.seconds:
                self._second(next_second)
                next_second += 1
            if arrival_s <= event_s:
                if place < len(traffic):
                    self._arrive(place)
                place += 1
            else:
                _, request, kind = heappop(self._events)
                {"end": self._end, "steal": self._steal, "given back": self._give_back}[kind](request)
        self.busy_s += sum(self.size.seconds - run.begun_s for run in self._runs.values())

    def _arrive(self, place: int) -> None:
        self.calls["enqueue"] += 1
        home = self._home(place)
        if home is not None and self.workers[home].free and not len(self.queue):
            self._begin(place, home)
        elif len(self.queue) or not self._ready():
            self._queue(place)
        elif home is not None and self.homes == "patient":
            self.workers[home].own.append(place)
            heappush(self._events, (self._now_s + self.steal_s, place, "steal"))
        else:
            self._give_to_ready(place)

    def _queue(self, place: int) -> None:
        self.queue.arrive(self._entry(place))
        self.longest_queue = max(self.longest_queue, len(self.queue))

    def _entry(self, place: int) -> Waiting:
        traffic = self.traffic
        return Waiting(self._id(place), str(traffic.tenant[place]), traffic.priority[place], cost=traffic.prompt[place])

    def _home(self, place: int) -> int | None:
        """Returns the live worker that scores highest for a beginning: the first live one in the beginning's random
        order.
        """
        beginning = self.traffic.beginning[place]
        if beginning == NO_HOME or self.homes == "none":
            return None
        random = Random(beginning)
        while True:
            home = random.randrange(self.size.workers)
            if self.workers[home].is_alive:
                return home

    def _ready(self) -> bool:
        """Checks for a worker with a free slot; others leave the list."""
        while self.ready:
            worker = self.workers[self.ready[0]]
            if worker.free and worker.is_alive:
                return True
            worker.is_listed = False
            self.ready.popleft()
        return False

    def _give_to_ready(self, place: int) -> None:
        """Ends the longest blocked read; its worker then looks for more, and waits again."""
        number = self.ready.popleft()
        self.workers[number].is_listed = False
        self.calls["blocked read"] += 1
        self.calls["take, none"] += 1
        self._begin(place, number)
        self._list(number)

    def _list(self, number: int) -> None:
        worker = self.workers[number]
        if worker.free and worker.is_alive and not worker.is_listed:
            worker.is_listed = True
            self.ready.append(number)

    def _begin(self, place: int, number: int, num_left: int | None = None) -> None:
        traffic, size, worker = self.traffic, self.size, self.workers[number]
        if num_left is None:
            num_left = traffic.output[place]
            self.waits_s[place] = self._now_s - traffic.at_s[place]
        prompt = traffic.prompt[place] + traffic.output[place] - num_left
        beginning = traffic.beginning[place]
        if beginning != NO_HOME:
            self.num_begun_alike += 1
            if beginning in worker.held:
                self.hits += 1
                prompt -= int(size.shared * traffic.prompt[place])
            worker.held[beginning] = None
            worker.held.move_to_end(beginning)
            if len(worker.held) > size.held:
                worker.held.popitem(last=False)
        first_s = self._now_s + prompt * size.prompt_token_s
        run = Run(number, self._now_s, first_s, first_s + num_left * size.token_s, num_left)
        self._runs[place] = run
        worker.free -= 1
        worker.running.add(place)
        self._wheel[int(self._now_s) % CHARGE_S].append(place)
        heappush(self._events, (run.end_s, place, "end"))

    def _end(self, place: int) -> None:
        run = self._runs.get(place)
        if run is None or run.end_s != self._now_s:  # its worker died in the meantime
            return
        del self._runs[place]
        self.busy_s += self._now_s - run.begun_s
        worker = self.workers[run.worker]
        worker.free += 1
        worker.running.discard(place)
        if self.lanes is not None:
            total = self.traffic.prompt[place] + OUTPUT_WEIGHT * self.traffic.output[place]
            self.lanes.settle(self._id(place), str(self.traffic.tenant[place]), total)
        self.calls["ack"] += 1
        self._take(run.worker)

    def _take(self, number: int) -> None:
        worker = self.workers[number]
        while worker.free and worker.own:
            place = worker.own.popleft()
            if self.waits_s[place] < 0 and place not in self._stolen:
                self._begin(place, number)
        if worker.free and len(self.queue):
            for entry in self.queue.take(worker.free, int(1000 * self._now_s)):
                self._take_on(entry.id.number, number)
            self.calls["take"] += 1
        elif worker.free:
            self.calls["take, none"] += 1
        self._list(number)

    def _take_on(self, place: int, number: int) -> None:
        if place not in self.orphans:
            self._begin(place, number)
            return
        self.resumed_s.append(self._now_s - self.orphans.pop(place))
        self._begin(place, number, self._runs.pop(place).num_left)

    def _steal(self, place: int) -> None:
        if self.waits_s[place] >= 0:
            return
        self._stolen.add(place)
        if self._ready():
            self._give_to_ready(place)
        else:
            self._queue(place)

    def _second(self, second: int) -> None:
        while self.deaths and self.deaths[0][0] <= second:
            _, part = self.deaths.popleft()
            for number in self.random.sample(range(self.size.workers), int(part * self.size.workers)):
                self._die(number)
        wheel = self._wheel[second % CHARGE_S]
        self._wheel[second % CHARGE_S] = [place for place in wheel if place in self._runs]
        if self.lanes is not None:
            for place in self._wheel[second % CHARGE_S]:
                run = self._runs[place]
                left = max(0, min(run.num_left, int((run.end_s - second) / self.size.token_s)))
                total = self.traffic.prompt[place] + OUTPUT_WEIGHT * (self.traffic.output[place] - left)
                self.lanes.charge([(self._id(place), str(self.traffic.tenant[place]), total)])
            self.samples.append((float(second), dict(self.lanes.counters), dict(self.lanes.seats)))

    def _die(self, number: int) -> None:
        """Ends a worker. Its requests are given back once its heartbeat lapses; those waiting for it are stolen."""
        worker = self.workers[number]
        worker.is_alive = False
        for place in worker.running:
            run = self._runs[place]
            self.busy_s += self._now_s - run.begun_s
            run.num_left = max(0, min(run.num_left, int((run.end_s - self._now_s) / self.size.token_s)))
            run.end_s = -1.0
            run.begun_s = self._now_s
            heappush(self._events, (self._now_s + TAKEOVER_S, place, "given back"))
        worker.running, worker.free = set(), 0

    def _give_back(self, place: int) -> None:
        self.orphans[place] = self._runs[place].begun_s
        self.queue.give_back(self._entry(place))
        if self._ready():
            number = self.ready.popleft()
            self.workers[number].is_listed = False
            self._take(number)

    def _id(self, place: int) -> EntryId:
        return EntryId(int(1000 * self.traffic.at_s[place]), place)
