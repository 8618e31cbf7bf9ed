"""Steps on the entries that a worker has: finding them again, and making dead letters of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol import keys
from penstock.protocol.lua import call, load
from penstock.protocol.redis.pipeline import Command

_PENDING = load("penstock.protocol.scripts", "entries/pending")
_BURY = load("penstock.protocol.scripts", "entries/bury")


@dataclass(frozen=True, slots=True)
class LetterLimits:
    """Limits of a stream of dead letters. The newest letter stays, whatever its size."""

    max_entries: int
    max_bytes: int  # names and values of all letters
    ttl_ms: int  # of a letter; if no other follows, it is kept for up to twice as long


def pending(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int, after: str) -> Command:
    """Asks for up to `count` entries pending for `worker` that follow `after`.

    `worker.run.entries` reads the answer.

    Args:
        queue: the entries' queue.
        worker: the consumer's name.
        count: the most entries to return.
        max_body_bytes: for a larger entry the answer holds only the size and the `id`.
        max_bytes: no further entry is answered once those so far have that many.
        after: the id of an entry.
    """
    arguments = (keys.GROUP, worker, count, max_body_bytes, max_bytes, after)
    return call(_PENDING, (keys.requests(queue),), arguments)


def bury(
    queue: str,
    *,
    worker: str,
    request_id: str = "",
    entry_id: str,
    letters: str,
    limits: LetterLimits,
    fields: Sequence[str | bytes],
) -> Command:
    """Moves an entry that is pending for `worker` to a stream of dead letters. Answers 1, or 0 if it is not pending for
    it.

    Args:
        queue: the entry's queue.
        worker: the one that has it.
        request_id: the request's, if its reply is known to have its end.
        entry_id: the queue entry's.
        letters: `keys.dead` or `keys.malformed` of the queue.
        limits: those of that stream.
        fields: the letter's, at most some hundred.
    """
    size = sum(len(part) if isinstance(part, bytes) else len(part.encode()) for part in fields)
    of_letters = (letters, keys.letter_sizes(letters), keys.letter_bytes(letters))
    bounds = (limits.max_entries, limits.max_bytes, limits.ttl_ms)
    key_names = (keys.requests(queue), *of_letters, keys.charged(queue), keys.seen(queue, request_id))
    return call(_BURY, key_names, (keys.GROUP, worker, entry_id, size, *bounds, *fields))
