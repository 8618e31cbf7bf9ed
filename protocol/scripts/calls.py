"""Steps on the stream of calls: taking them, and answering each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.protocol import keys
from penstock.protocol.lua import call, load
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.wire import DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS, Envelope

_TAKE = load("penstock.protocol.scripts", "calls/take")
_REDATE = load("penstock.protocol.scripts", "calls/redate")
_ANSWER = load("penstock.protocol.scripts", "calls/answer")

MAX_DROPPED = 256  # overdue calls per script
MAX_REDATED = 1000  # calls per script


def take_calls(
    queue: str,
    *,
    worker: str,
    count: int,
    max_body_bytes: int,
    max_bytes: int,
    idle_ms: int,
    in_hand: Iterable[str],
) -> Command:
    """Takes up to `count` calls, and renews the hold on those `in_hand`; `worker.calls.server` reads the answer.

    Args:
        queue: the calls' queue.
        worker: the consumer's name.
        count: the most calls to take.
        max_body_bytes: for a larger call the answer holds only the size, `id` and `to`.
        max_bytes: no further call is taken once the calls so far have that many.
        idle_ms: a call whose hold was not renewed for that long is taken over.
        in_hand: the entries of the calls that this worker is answering.
    """
    limits = (count, max_body_bytes, max_bytes, idle_ms, DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS, MAX_DROPPED)
    return call(_TAKE, (keys.calls(queue),), (keys.GROUP, worker, *limits, *in_hand))


def redate_calls(queue: str) -> Command:
    """Redates calls taken in the future, as it seems after a clock was set back: they count as taken now."""
    return call(_REDATE, (keys.calls(queue),), (keys.GROUP, MAX_REDATED))


def answer_call(
    queue: str, envelope: Envelope, *, worker: str, entry_id: str, ttl_ms: int, fields: Mapping[str, str]
) -> Command:
    """Writes the answer and removes the call. Answers 1, or 0 if another worker has it by now, or it is gone or too
    late.

    Args:
        queue: the call's queue.
        envelope: the call's.
        worker: the name of the one that answers.
        entry_id: the call's entry.
        ttl_ms: how long the answer is kept.
        fields: the answer's.
    """
    flat = [part for pair in fields.items() for part in pair]
    key_names = (keys.calls(queue), keys.answers(queue, envelope.mailbox))
    return call(_ANSWER, key_names, (keys.GROUP, worker, entry_id, envelope.timeout_ms, ttl_ms, *flat))
