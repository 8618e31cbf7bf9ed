"""Takes one look at a queue: one script and one round trip, on the one node that holds the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from penstock.protocol import keys, lua
from penstock.protocol.consumers import is_worker
from penstock.protocol.operations.reports import REMEMBERED_S, WorkerReport, decode_report
from penstock.protocol.operations.snapshot import DeadLetter, Lane, RunningRequest, Snapshot, TenantLane, Worker
from penstock.protocol.queue.load import QueueLoad, priorities
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import execute_one
from penstock.protocol.redis.streams import pairs
from penstock.protocol.wire import ModelCard, decode_card

_LOOK = lua.load("penstock.protocol.operations", "look")

MOST_BANDS = 16
MOST_TENANTS = 5
"""Number of tenants shown for each band, those next in turn."""

MOST_LETTERS = 10


async def look(redis: RedisClient, queue: str, *, most_tenants: int = MOST_TENANTS) -> Snapshot:
    """Returns the state of `queue` now, for a client that does not decode.

    Args:
        redis: as a user with the role `operator`.
        queue: the queue's name.
        most_tenants: how many of each priority are listed by name.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
    """
    arguments = (keys.GROUP, keys.WAITING, keys.UNOWNED, MOST_BANDS, most_tenants, MOST_LETTERS)
    answer = await execute_one(redis, lua.call(_LOOK, _key_names(queue), arguments, only_reads=True))
    return _snapshot(queue, answer)


def _key_names(queue: str) -> tuple[str, ...]:
    return (
        keys.requests(queue),
        keys.reports(queue),
        keys.digests(queue),
        keys.card(queue),
        keys.load(queue),
        keys.bands(queue),
        keys.dead(queue),
        keys.malformed(queue),
        keys.report(queue, ""),
        keys.heartbeat(queue, ""),
        keys.drain(queue, ""),
        keys.band(queue),
        keys.lane(queue),
    )


def _snapshot(queue: str, answer: Sequence[Any]) -> Snapshot:
    at_ms, length, last_read, waiting, unowned, consumers, load, card, bands, num_dead, num_malformed, letters = answer
    workers = _workers(consumers, at_ms)
    numbers = _load(load)
    num_waiting = max(0, length - sum(worker.num_taken for worker in workers))
    held = sum(max(0, each[1]) for each in consumers if not is_worker(each[0].decode(errors="replace")))
    return Snapshot(
        queue=queue,
        at_ms=at_ms,
        workers=workers,
        running=_running(workers, at_ms),
        num_waiting=num_waiting,
        num_new=None if last_read is None else max(0, num_waiting - held),
        oldest_s=_oldest_s((waiting, unowned), at_ms),
        lanes=_lanes(bands, numbers),
        load=numbers,
        card=_card(card),
        num_dead=num_dead,
        num_malformed=num_malformed,
        letters=tuple(_letter(letter, at_ms) for letter in letters),
    )


def _workers(consumers: Iterable[Sequence[Any]], at_ms: int) -> tuple[Worker, ...]:
    found = []
    for raw_name, num_taken, listed_until, report, left_ms, instance, marked, digest in consumers:
        name = raw_name.decode(errors="replace")
        if not is_worker(name):
            continue
        reported = _report(report)
        reported_ms = None if listed_until is None else float(listed_until) - REMEMBERED_S * 1000
        is_marked = instance is not None and marked == instance
        found.append(
            Worker(
                name,
                num_taken=max(0, num_taken),
                heartbeat_left_ms=None if instance is None else left_ms,
                is_draining=is_marked or (reported is not None and reported.phase == "draining"),
                digest=None if digest is None else digest.decode(errors="replace"),
                report=reported,
                reported_s=None if reported_ms is None else max(0.0, at_ms - reported_ms) / 1000,
            )
        )
    return tuple(sorted(found, key=lambda worker: worker.name))


def _report(text: bytes | None) -> WorkerReport | None:
    with suppress(ValueError):  # from a later version, or somebody else wrote it
        return None if text is None else decode_report(text)
    return None


def _running(workers: Iterable[Worker], at_ms: int) -> tuple[RunningRequest, ...]:
    """Lists each running request once. Of two workers that report it, the last to claim it counts: the other is dead or
    frozen.
    """
    found: dict[str, tuple[int, RunningRequest]] = {}
    for worker in workers:
        for each in () if worker.report is None or worker.state == "lost" else worker.report.requests:
            if each.id in found and found[each.id][0] >= each.claimed_ms:
                continue
            running = RunningRequest(
                id=each.id,
                worker=worker.name,
                tenant=each.tenant,
                phase=each.phase,
                age_s=max(0, at_ms - each.enqueued_ms) / 1000,
                running_s=max(0, at_ms - each.claimed_ms) / 1000,
                prompt_tokens=each.prompt_tokens,
                tokens=each.tokens,
                takeovers=max(0, each.turn - 1),
                prefilled=each.prefilled,
            )
            found[each.id] = (each.claimed_ms, running)
    return tuple(sorted((running for _, running in found.values()), key=lambda each: (-each.age_s, each.id)))


def _load(flat: Sequence[bytes]) -> QueueLoad | None:
    with suppress(ValueError):  # somebody wrote something else there
        return QueueLoad.of(pairs(flat)) if flat else None
    return None


def _card(flat: Sequence[bytes]) -> ModelCard | None:
    with suppress(ValueError):
        return decode_card(pairs(flat)) if flat else None
    return None


def _lanes(bands: Iterable[Sequence[Any]], load: QueueLoad | None) -> tuple[Lane, ...]:
    """Returns the counts for each priority, with the tenants that are next in turn."""
    counted = {} if load is None else {band.priority: band for band in load.bands}
    tenants: dict[int, tuple[int, tuple[TenantLane, ...]]] = {}
    for raw_priority, num_tenants, found in bands:
        if not (found_priority := priorities([raw_priority])):
            continue
        [priority] = found_priority
        lanes = tuple(
            TenantLane(name.decode(errors="replace"), priority, num, float(served)) for name, served, num in found
        )
        tenants[priority] = (num_tenants, lanes)
    found_lanes: list[Lane] = []
    for priority in sorted(counted.keys() | tenants.keys(), reverse=True):
        band = counted.get(priority)
        num_tenants, of_band = tenants.get(priority, (0, ()))
        numbers = (0, 0, 0.0) if band is None else (band.num_requests, band.tokens, band.oldest_s)
        seen = sum(tenant.num_waiting for tenant in of_band)  # counted now; the other count may be a second old
        found_lanes.append(Lane(priority, max(numbers[0], seen), *numbers[1:], num_tenants, of_band))
    return tuple(found_lanes)


def _oldest_s(entries: Iterable[bytes | None], at_ms: int) -> float | None:
    ages = [max(0, at_ms - int(entry.partition(b"-")[0])) / 1000 for entry in entries if entry is not None]
    return max(ages, default=None)


def _letter(letter: Sequence[bytes], at_ms: int) -> DeadLetter:
    letter_id, request_id, code, worker, crashes = (part.decode(errors="backslashreplace") for part in letter)
    given_up_ms = int(letter_id.partition("-")[0])
    age_s = max(0, at_ms - given_up_ms) / 1000
    return DeadLetter(letter_id, request_id, code, worker, age_s, int(crashes) if crashes.isdecimal() else None)
