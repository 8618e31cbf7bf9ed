"""The steps on the entries of a queue: taking them, letting go of them, and what becomes of a dead worker's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.producer import keys
from penstock.producer.consumers import set_aside_for
from penstock.producer.redis.lua import call, load
from penstock.producer.redis.pipeline import Command

_ADOPT = load("penstock.worker.protocol", "sized", "adopt")
_PENDING = load("penstock.worker.protocol", "sized", "pending")
_BURY = load("penstock.worker.protocol", "junk", "owned", "bury")
_DISOWN = load("penstock.worker.protocol", "owned", "disown")
_RETIRE = load("penstock.worker.protocol", "retire")
_SET_ASIDE = load("penstock.worker.protocol", "owned", "set_aside")


@dataclass(frozen=True, slots=True)
class LetterLimits:
    """What a stream of dead letters holds at most. The newest letter stays, whatever it takes."""

    max_entries: int
    max_bytes: int  # names and values of all letters
    ttl_ms: int  # of a letter; where no other follows, it is kept for up to twice as long


def adopt(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int, digest: str = "") -> Command:
    """Takes up to `count` entries that nobody owns, those that were set aside for the worker's model first.

    `worker.delivery.entries` reads the answer.

    Args:
        queue: whose.
        worker: the consumer's name.
        count: of entries at most.
        max_body_bytes: of a larger entry the answer holds only the size and the `id`.
        max_bytes: no entry is taken once those before it have so many together.
        digest: of the worker's model.
    """
    sources = (set_aside_for(digest), keys.UNOWNED) if digest else (keys.UNOWNED,)
    arguments = (keys.GROUP, worker, count, max_body_bytes, max_bytes, *sources)
    return call(_ADOPT, (keys.requests(queue),), arguments)


def pending(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int, after: str) -> Command:
    """As `adopt`, of the entries pending for `worker`, from the one that follows `after` on."""
    arguments = (keys.GROUP, worker, count, max_body_bytes, max_bytes, after)
    return call(_PENDING, (keys.requests(queue),), arguments)


def bury(
    queue: str, *, worker: str, entry_id: str, letters: str, limits: LetterLimits, fields: Sequence[str | bytes]
) -> Command:
    """Moves an entry that is pending for `worker` to a stream of dead letters: 1, or 0 if it is not pending for it.

    Args:
        queue: where the entry is.
        worker: whose it is.
        entry_id: of the queue entry.
        letters: `keys.dead` or `keys.malformed` of the queue.
        limits: what that stream may hold.
        fields: of the letter, at most some hundred.
    """
    size = sum(len(part) if isinstance(part, bytes) else len(part.encode()) for part in fields)
    of_letters = (letters, keys.letter_sizes(letters), keys.letter_bytes(letters))
    bounds = (limits.max_entries, limits.max_bytes, limits.ttl_ms)
    key_names = (keys.requests(queue), *of_letters, keys.charged(queue))
    return call(_BURY, key_names, (keys.GROUP, worker, entry_id, size, *bounds, *fields))


def disown(queue: str, *, worker: str, entry_ids: Iterable[str]) -> Command:
    """Hands those of `entry_ids` that are pending for `worker` to `keys.UNOWNED`; answers how many."""
    return call(_DISOWN, (keys.requests(queue),), (keys.GROUP, worker, keys.UNOWNED, *entry_ids))


def set_aside(queue: str, *, worker: str, entry_id: str, digest: str) -> Command:
    """Hands an entry to the workers whose model has this digest: 1, or 0 if none has served the queue for a while."""
    consumer = set_aside_for(digest)
    key_names = (keys.requests(queue), keys.heartbeat(queue, consumer))
    return call(_SET_ASIDE, key_names, (keys.GROUP, worker, consumer, entry_id))


def retire(queue: str, *, stream: str, consumer: str, count: int) -> Command:
    """Disowns up to `count` entries of a consumer whose heartbeat is gone, and removes it once it has none.

    `stream` is that of the requests or of the calls of `queue`. Answers how many were disowned, or -1 if the consumer
    lives.
    """
    arguments = (keys.GROUP, consumer, keys.UNOWNED, count)
    of_queue = (keys.digests(queue), keys.room(queue), keys.serving(queue))
    of_worker = (keys.nudges(queue, consumer), keys.report(queue, consumer))
    key_names = (stream, keys.heartbeat(queue, consumer), *of_queue, *of_worker)
    return call(_RETIRE, key_names, arguments)
