"""Steps on a worker's heartbeat, which holds its name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol import keys
from penstock.protocol.consumers import kind_of, set_aside_for
from penstock.protocol.lua import call, load
from penstock.protocol.redis.pipeline import Command

_ANNOUNCE = load("penstock.protocol.scripts", "presence/announce")
_BEAT = load("penstock.protocol.scripts", "presence/beat")
_LAPSED = load("penstock.protocol.scripts", "presence/lapsed")
_LEAVE = load("penstock.protocol.scripts", "presence/leave")
_LOOK = load("penstock.protocol.scripts", "presence/look")
_RELEASE = load("penstock.protocol.scripts", "presence/release")
_REPORT = load("penstock.protocol.scripts", "presence/report")
_RESERVE = load("penstock.protocol.scripts", "presence/reserve")
_UNREPORT = load("penstock.protocol.scripts", "presence/unreport")


@dataclass(frozen=True, slots=True)
class Rival:
    """Another process that holds this one's name."""

    instance: str
    expires_ms: int  # server time; each of its beats postpones it
    server_ms: int  # the server's clock now

    @property
    def left_s(self) -> float:
        """Seconds until the name is free, unless the rival beats again."""
        return max(1, self.expires_ms - self.server_ms) / 1000

    def is_seen_to_live(self, before: Rival | None) -> bool:
        """Checks whether the rival has renewed its key since `before`; a dead one's key just lapses."""
        if before is None or before.instance != self.instance:
            return False
        return self.expires_ms > before.expires_ms


@dataclass(frozen=True, slots=True)
class OtherModel(Rival):
    """The workers of the queue, of which `instance` names one, serve another model."""

    field: str  # of the card, the first in which the two differ
    theirs: str
    own: str


@dataclass(frozen=True, slots=True)
class Beaten:
    """The answer to a renewed heartbeat."""

    drain_mark: str  # the instance that is to drain, "" for none
    served_ms: int  # until the queue's last heartbeat lapses, whatever its time to live; 0: nobody serves


def new_instance(ttl_ms: int) -> str:
    """Makes a unique name for this process. It says how long the process's keys last at most.

    The server counts a time to live. If its clock is set back, the keys of a dead process would outlive it by that
    much. So every reader cuts them to the time in the name (`cut.lua`): it may differ within a queue, and otherwise
    only a key's owner would know it.
    """
    return f"{secrets.token_hex(8)}/{ttl_ms}"


def beat(
    queue: str,
    *,
    worker: str,
    instance: str,
    ttl_ms: int,
    is_serving: bool,
    must_match: bool,
    card: Mapping[str, str],
    model_ttl_ms: int,
) -> Command:
    """Renews the heartbeat of `instance`, or sets it if there is none. Read the answer with `parse_beat`.

    The same step tells clients whether the worker serves the queue (`keys.serving`), and with what (`keys.card`).

    Args:
        queue: the worker's.
        worker: its name.
        instance: the process's.
        ttl_ms: how long the heartbeat lasts.
        is_serving: whether the worker takes requests.
        must_match: whether to do nothing if there is no heartbeat (any more) and the queue's card is of another model.
        card: fields of this worker's card.
        model_ttl_ms: how long after a worker served the queue half-written replies wait for another of its kind.
    """
    digest, kind = card.get("digest", ""), _kind(card)
    of_worker = (keys.heartbeat(queue, worker), keys.drain(queue, worker))
    of_queue = (keys.serving(queue), keys.card(queue), keys.digests(queue))
    of_lanes = (keys.homes(queue), keys.nudges(queue, worker))
    of_kind = (keys.heartbeat(queue, set_aside_for(kind)), keys.alike(queue, kind), keys.lapses(queue))
    key_names = (*of_worker, *of_queue, keys.heartbeat(queue, set_aside_for(digest)), *of_lanes, *of_kind)
    fields = [part for pair in card.items() for part in pair]
    arguments: tuple[str | int, ...] = (
        instance,
        ttl_ms,
        worker,
        int(is_serving),
        int(must_match),
        digest,
        model_ttl_ms,
        *fields,
    )
    return call(_BEAT, key_names, arguments)


def parse_beat(answer: Any) -> Beaten | Rival:
    """Returns the renewed heartbeat, else the name's holder, or `OtherModel`."""
    texts: list[Any] = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in answer]
    if len(texts) == 2:
        return Beaten(texts[0], texts[1])
    return Rival(*texts) if len(texts) == 3 else OtherModel(*texts)


def look(queue: str, *, worker: str, rest_ms: int) -> Command:
    """Asks whether `worker` should look for dead workers now, and when to ask again: in `rest_ms` at most.

    The answer begins with 1 if it should, because no other worker has looked within `rest_ms`.
    """
    return call(_LOOK, (keys.looked(queue),), (worker, rest_ms))


def lapsed(queue: str, workers: Sequence[str]) -> Command:
    """Asks which of `workers`, at least one, have no heartbeat. The answer is their places in the list, from 1 on.

    Bytes of a name that are not UTF-8 come as surrogates: strangers may have named a consumer.
    """
    return call(_LAPSED, [keys.heartbeat(queue, worker).encode(errors="surrogateescape") for worker in workers], ())


def announce(queue: str, *, ttl_ms: int) -> Command:
    """Puts `queue` on the list of served queues for `ttl_ms`; with 0, takes it off."""
    return call(_ANNOUNCE, (keys.queues(),), (queue, ttl_ms))


def reserve(queue: str, *, worker: str, instance: str, ttl_ms: int) -> Command:
    """Reserves the name for a process that does not serve yet, or renews that. Read the answer with `parse_reserve`."""
    key_names = (keys.heartbeat(queue, worker), keys.starting(queue, worker))
    return call(_RESERVE, key_names, (instance, ttl_ms))


def parse_reserve(answer: Any) -> Rival | None:
    """Returns the process that holds the name instead."""
    return Rival(answer[0].decode(errors="replace"), *answer[1:]) if len(answer) == 3 else None


def release(queue: str, *, worker: str, instance: str) -> Command:
    """Undoes `reserve`. Answers 1, or 0 if the name was not reserved for `instance`."""
    return call(_RELEASE, (keys.starting(queue, worker),), (instance,))


def report(queue: str, *, worker: str, text: str, ttl_ms: int, listed_ms: int) -> Command:
    """Reports the state of `worker` to operators.

    Args:
        queue: the worker's.
        worker: its name.
        text: the report, from `WorkerReport.encode`.
        ttl_ms: how long it can be read.
        listed_ms: how long the worker is listed.
    """
    return call(_REPORT, _report_keys(queue, worker), (worker, text, ttl_ms, listed_ms))


def unreport(queue: str, *, worker: str) -> Command:
    """Withdraws the last report of `worker`, which leaves."""
    return call(_UNREPORT, _report_keys(queue, worker), (worker,))


def _report_keys(queue: str, worker: str) -> tuple[str, str]:
    return keys.report(queue, worker), keys.reports(queue)


def leave(queue: str, *, worker: str, instance: str, card: Mapping[str, str]) -> Command:
    """Removes the heartbeat of `instance`, whose card this is, its drain mark, and its consumers if nothing is pending.

    Answers 0 if another process has the name, 2 if nobody serves the queue now, else 1.
    """
    of_worker = (keys.heartbeat(queue, worker), keys.drain(queue, worker))
    of_queue = (keys.serving(queue), keys.card(queue), keys.calls(queue), keys.digests(queue))
    of_lanes = (keys.room(queue), keys.nudges(queue, worker), keys.alike(queue, _kind(card)), keys.lapses(queue))
    key_names = (keys.requests(queue), *of_worker, *of_queue, *of_lanes)
    return call(_LEAVE, key_names, (keys.GROUP, worker, instance))


def _kind(card: Mapping[str, str]) -> str:
    return kind_of(card.get("digest", ""), card.get("arithmetic", ""))
