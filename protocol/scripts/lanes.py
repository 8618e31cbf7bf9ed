"""Steps on waiting entries, and on what their tenants have been served. docs/lanes.md says in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.protocol import keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.lua import call, load
from penstock.protocol.ranks import LOWEST_PRIORITY
from penstock.protocol.redis.pipeline import Command

_TAKE = load("penstock.protocol.scripts", "lanes/take")
_PASS_ON = load("penstock.protocol.scripts", "lanes/pass_on")
_RETIRE = load("penstock.protocol.scripts", "lanes/retire")
_RETIRE_CALLS = load("penstock.protocol.scripts", "calls/retire")
_SET_ASIDE = load("penstock.protocol.scripts", "lanes/set_aside")
_PUT_BACK = load("penstock.protocol.scripts", "lanes/put_back")
_RELANE = load("penstock.protocol.scripts", "lanes/relane")
_SWEEP = load("penstock.protocol.scripts", "lanes/sweep")
_MEASURE = load("penstock.protocol.scripts", "lanes/measure")
_SAY = load("penstock.protocol.scripts", "lanes/say")
_CHARGE = load("penstock.protocol.scripts", "lanes/charge")
_ACK = load("penstock.protocol.scripts", "lanes/ack")

MAX_OVERTAKES = 20
NEW_PER_SCRIPT = 256  # entries placed per run, which blocks the whole server
WISHES_PER_SCRIPT = 500  # cancellations looked at per run
BYTES_PER_SCRIPT = 8 << 20  # of bodies read per run, and one entry more


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """Capacity of one worker, and averages of the requests that it ended recently. 0: not yet known."""

    slots: float  # requests at once; 0: it takes none
    tokens_per_s: float = 0.0  # while requests wait
    reply_tokens: float = 0.0
    token_bytes: float = 0.0  # of an entry, per token of its prompt


@dataclass(frozen=True, slots=True)
class Bill:
    """Total cost of an entry, however often its tokens were computed."""

    entry_id: str
    tenant: str
    tokens: int | None  # weighted; None: as charged before
    ended_id: str = ""  # of the request, if its reply has ended


def take(
    queue: str,
    *,
    worker: str,
    count: int,
    max_body_bytes: int,
    max_bytes: int,
    max_overtakes: int = MAX_OVERTAKES,
    lowest: int = LOWEST_PRIORITY,
    room: int | None = None,
    steal_after_ms: int = 0,
    kinds: tuple[str, str] = ("", ""),
    exact_wait_ms: int = 0,
) -> Command:
    """Gives new entries their places, and takes up to `count` entries that are next.

    Answers the entries, which `worker.run.entries` reads; whether some new ones got no place in this run; and in
    how many ms any worker may take an entry that is left to some, or None if none is.

    Args:
        queue: the entries' queue.
        worker: the consumer's name.
        count: the most entries to take.
        max_body_bytes: for a larger entry the answer holds only the size and the `id`.
        max_bytes: no further entry is taken once those so far have that many.
        max_overtakes: times that the oldest entry, once it has waited some seconds, may be overtaken, counting all
            workers.
        lowest: no entry of a lower priority is taken.
        room: number of further sequences that the worker could run; None: `count`.
        steal_after_ms: how long an entry is left to the worker that is its home, if that has room.
        kinds: of the worker, by its model and by its arithmetic too; "": unknown. What was set aside for them is taken
            too.
        exact_wait_ms: for how long an entry that lost its worker may be left to workers that round alike.
    """
    bounds = (keys.GROUP, worker, count, max_body_bytes, max_bytes)
    more = (NEW_PER_SCRIPT, max_overtakes, lowest, count if room is None else room, steal_after_ms)
    return call(_TAKE, _home_keys(queue), (*bounds, *more, *kinds, exact_wait_ms))


def pass_on(queue: str, *, worker: str, entry_id: str, lowest: int, room: int, steal_after_ms: int = 0) -> Command:
    """Makes an entry of `worker` wait again if another worker should have it. Answers whether it does.

    Another should have it if the entry's home has room or soon will, if this worker has no room and another has, or
    if its priority is under `lowest`. Arguments are as for `take`.
    """
    return call(_PASS_ON, _home_keys(queue), (keys.GROUP, worker, 0, 0, 0, entry_id, lowest, room, steal_after_ms))


def put_back(
    queue: str, *, worker: str, entry_ids: Iterable[str], has_had: bool = True, max_bytes: int = BYTES_PER_SCRIPT
) -> Command:
    """Makes those of `entry_ids` that are pending for `worker` wait again, in their order.

    Answers how many of `entry_ids` it looked at, from the first on, and how many wait now. It stops early once it has
    read bodies of `max_bytes`.

    Args:
        queue: the entries' queue.
        worker: the one that has the entries.
        entry_ids: the entries, at most some hundred.
        has_had: whether workers have worked on them: then they go ahead of new ones of their tenant and priority.
        max_bytes: the most to read of bodies; only those of entries that no script knows are read.
    """
    bounds = (keys.GROUP, worker, 0, 0, max_bytes, int(has_had))
    return call(_PUT_BACK, (*_lane_keys(queue), keys.backlog(queue)), (*bounds, *entry_ids))


def set_aside(
    queue: str, *, worker: str, entry_id: str, kind: str, wait_ms: int | None = None, is_new: bool = False
) -> Command:
    """Leaves an entry to workers of one kind. Answers 1, or 0: it is not left to them.

    Without `wait_ms` that is because none has served the queue for a while. With it, no such worker serves now, or the
    time is over.

    Args:
        queue: the entry's queue.
        worker: the one that has the entry.
        entry_id: the entry.
        kind: that of the workers, as in `consumers`.
        wait_ms: how long after it lost its worker; None: as long as such workers serve, and a while longer.
        is_new: whether it has lost its worker just now, if nobody noted when.
    """
    of_kind = (keys.heartbeat(queue, set_aside_for(kind)), keys.alike(queue, kind))
    key_names = (*_lane_keys(queue), *of_kind, keys.room(queue), keys.nudges(queue), keys.backlog(queue))
    wait = "" if wait_ms is None else wait_ms
    bounds = (keys.GROUP, worker, 0, 0, BYTES_PER_SCRIPT)
    return call(_SET_ASIDE, key_names, (*bounds, kind, entry_id, wait, int(is_new)))


def retire(queue: str, *, stream: str, consumer: str, count: int, max_bytes: int = BYTES_PER_SCRIPT) -> Command:
    """Makes up to `count` entries of a consumer without a heartbeat wait again, and removes the consumer once it has
    none.

    `stream` is the request stream or the stream of calls of `queue`. Answers how many were freed, 0 once there are no
    more, or -1 if the consumer lives. It stops early once it has read bodies of `max_bytes`. The name is as in
    `lapsed`.
    """
    of_queue = (keys.digests(queue), keys.room(queue), keys.serving(queue))
    of_worker = (keys.nudges(queue, consumer), keys.report(queue, consumer))
    texts = (keys.heartbeat(queue, consumer), *of_queue, *of_worker)
    name, *about = (text.encode(errors="surrogateescape") for text in (consumer, *texts))
    if stream != keys.requests(queue):
        return call(_RETIRE_CALLS, (stream, *about), (keys.GROUP, name, keys.UNOWNED, count))
    more = (keys.lapses(queue), keys.nudges(queue), keys.backlog(queue))
    key_names: tuple[str | bytes, ...] = (*_lane_keys(queue), *about, *more)
    return call(_RETIRE, key_names, (keys.GROUP, name, count, 0, max_bytes))


def sweep(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int) -> Command:
    """Takes entries, like `take`, that need no run any more: their time is over, or they were cancelled.

    Answers the entries, whether there are more new ones, and whether there is more to look at.
    """
    bounds = (keys.GROUP, worker, count, max_body_bytes, max_bytes)
    key_names = (*_lane_keys(queue), keys.cancelled(queue), keys.seen(queue, ""), keys.backlog(queue))
    return call(_SWEEP, key_names, (*bounds, NEW_PER_SCRIPT, WISHES_PER_SCRIPT))


def say(queue: str, *, worker: str, part: WorkerCapacity, every_ms: int) -> Command:
    """Reports the capacity of `worker`. Answers how many requests waited at the last look, and whether the next look is
    due.

    Args:
        queue: the worker's.
        worker: its name.
        part: the worker's.
        every_ms: between two looks.
    """
    numbers = (part.slots, part.tokens_per_s, part.reply_tokens, part.token_bytes)
    arguments = (worker, every_ms, " ".join(f"{number:.6g}" for number in numbers))
    return call(_SAY, (keys.workers(queue), keys.load(queue)), arguments)


def relane(queue: str, *, after: str) -> Command:
    """Places waiting entries after `after` again; answers after which to go on, or None at the end."""
    bounds = (keys.GROUP, "", NEW_PER_SCRIPT, 0, BYTES_PER_SCRIPT)
    return call(_RELANE, (*_lane_keys(queue), keys.backlog(queue)), (*bounds, after))


def measure(queue: str, *, every_ms: int, target_s: float, max_bytes: int) -> Command:
    """Measures the queue and writes `keys.load`, if nobody has for `every_ms`. Answers how many requests wait.

    Args:
        queue: to measure.
        every_ms: between two looks.
        target_s: time within which waiting requests should begin.
        max_bytes: the most to read of bodies if the waiting entries must be recounted.
    """
    key_names = (*_lane_keys(queue), keys.load(queue), keys.workers(queue), keys.backlog(queue))
    return call(_MEASURE, key_names, (keys.GROUP, "", 0, 0, max_bytes, every_ms, f"{target_s:.6g}"))


def charge(queue: str, *, worker: str, bills: Iterable[Bill]) -> Command:
    """Charges the tenants of entries that are pending for `worker`: the last bill holds. Answers how many."""
    return call(_CHARGE, _account_keys(queue), (keys.GROUP, worker, *_flat(bills)))


def ack(queue: str, *, worker: str, bills: Iterable[Bill]) -> Command:
    """Acknowledges, deletes and settles those entries that are pending for `worker`; answers how many."""
    bills = list(bills)  # under its own entry's id, nobody can have enqueued a request
    seen = (keys.seen(queue, bill.ended_id) for bill in bills if bill.ended_id not in ("", bill.entry_id))
    return call(_ACK, (*_account_keys(queue), *seen), (keys.GROUP, worker, *_flat(bills)))


def _flat(bills: Iterable[Bill]) -> list[str | int]:
    bills = sorted(bills, key=lambda bill: tuple(map(int, bill.entry_id.split("-"))))
    return [part for bill in bills for part in (bill.entry_id, bill.tenant, "" if bill.tokens is None else bill.tokens)]


def _account_keys(queue: str) -> tuple[str, ...]:
    """Returns the keys that `accounts.lua` names."""
    return (
        keys.requests(queue),
        keys.lane(queue),
        keys.band(queue),
        keys.bands(queue),
        keys.service(queue),
        keys.weights(queue),
        keys.charged(queue),
        keys.due(queue),
    )


def _lane_keys(queue: str) -> tuple[str, ...]:
    index = (keys.passed(queue), keys.named(queue), keys.asked(queue), keys.aside(queue), keys.orphaned(queue))
    return (*_account_keys(queue), *index)


def _home_keys(queue: str) -> tuple[str, ...]:
    of_homes = (keys.homes(queue), keys.room(queue), keys.serving(queue), keys.nudges(queue))
    return (*_lane_keys(queue), *of_homes, keys.backlog(queue))
