"""Steps on one request: claim, finish, hand back, and look up its owner.

Fields of a request's state hash:
    entry             the queue entry this request came with; another entry with the same id is a duplicate
    epoch             of the last claim, the fencing token: reply entries are `<epoch>-<n>`, so Redis refuses those of
                      earlier claims
    worker, instance  the last claim's; the instance tells a restarted worker from the one that died
    status            running, queued (handed back), done, dead
    claimed_ms        server time of the first claim
    attempts          number of claims
    crashes           claims that ended with the worker's death, as far as it has not come back
    strikes           crashes in a row between which the reply did not grow, counting the first
    handbacks         claims that a draining worker gave back
    tenant            whom the request is for, if it says so
    digest            of the model that claimed it last; once the reply is begun, of the model that began it
    begun             the reply has more than claims: only that model continues it
    arithmetic        of the worker that claimed it last to generate; once the reply is begun, others may have to wait
    inexact           workers of several arithmetics have generated
    alive:<epoch>     the owner of that claim was frozen, not dead

An epoch is the server's clock in microseconds. Redis may lose its last writes in a failover or a power cut. An epoch
counted up from what is left would then be given a second time, and two owners would take each other's entries for their
own. If the clock is behind what the reply or the state holds, the epoch leaps ahead of that by a random distance
instead. So epochs rise, and no two claims share one, whatever was rolled back. As two servers' clocks could agree to
the microsecond, an owner's instance is always checked too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.protocol import keys
from penstock.protocol.lua import call, load
from penstock.protocol.redis.pipeline import Command

FlatFields: TypeAlias = Sequence[str]
"""Field, value, field, value, ..."""

MAX_EPOCH = 2**53 - 2**30
"""Highest epoch of a claim: Lua's numbers are exact up to 2**53, which the clock reaches in the year 2255."""

_LEAP_BITS = 26  # 67 s: soon after, epochs follow the clock again

_CLAIM = load("penstock.protocol.scripts", "claims/claim")
_FINISH = load("penstock.protocol.scripts", "claims/finish")
_END_UNCLAIMED = load("penstock.protocol.scripts", "claims/end_unclaimed")
_RETURN = load("penstock.protocol.scripts", "claims/return_request")
_ABSOLVE = load("penstock.protocol.scripts", "claims/absolve")
_NEWEST = load("penstock.protocol.scripts", "claims/newest")
_FIND = load("penstock.protocol.scripts", "claims/find")


@dataclass(frozen=True, slots=True)
class EarlierClaim:
    """The last claim of a request before this worker's."""

    epoch: int
    worker: str
    was_held: bool  # it was not given back: its worker died, froze or lost the request


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim script's answer if this worker has claimed the request."""

    epoch: int
    instance: str  # of the process that claimed
    has_journal: bool  # the reply already had entries, from earlier claims
    is_cancelled: bool
    server_ms: int  # the server's clock at the claim
    first_server_ms: int  # the server's clock at the request's first claim
    attempts: int
    crashes: int
    strikes: int
    handbacks: int
    is_of_other_model: bool = False  # another model began the reply, so this one may only end it
    is_of_other_arithmetic: bool = False  # another arithmetic did, and the request is over or must not go on here
    is_exact: bool = True  # all workers that generate the reply round alike
    arithmetic: str = ""  # of this worker
    earlier: EarlierClaim | None = None

    @property
    def only_ends(self) -> bool:
        """Whether the worker may end the reply and not go on with it."""
        return self.is_of_other_model or self.is_of_other_arithmetic


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """Why there is nothing to run.

    The reply has ended; another entry has the same request id; the reply holds an entry id that no claim can exceed;
    another model or arithmetic began it; a field of its state that must be a number is not one; or the claim was only
    to end the request, which is not over.
    """

    reason: Literal["done", "dead", "duplicate", "unwritable", "other_model", "other_arithmetic", "junk", "goes_on"]
    other_entry: str = ""
    field: str = ""  # the field of the state that is not a number
    digest: str = ""  # of the model that began it
    arithmetic: str = ""  # the one that began the reply, if that is the reason


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The server's record of a request: its owner, and one entry of its reply."""

    owner: tuple[str, str] | None  # (epoch, instance) of the last claim
    entry_id: str | None  # of the requested reply entry
    fields: tuple[bytes, ...] = ()  # of that entry

    def is_of(self, claim: Claim) -> bool:
        """Checks that no other claim came after this one."""
        return self.owner == (str(claim.epoch), claim.instance)


def claim(
    queue: str,
    request_id: str,
    *,
    entry_id: str,
    worker: str,
    instance: str,
    ttl_ms: int,
    gone_entry: str = "",
    tenant: str = "",
    digest: str = "",
    any_model: bool = False,
    timeout_ms: int | None = None,
    only_over: bool = False,
    arithmetic: str = "",
    any_arithmetic: Literal["", "continue", "end"] = "",
) -> Command:
    """Claims a request with a higher epoch, its fencing token. Read the answer with `parse_claim`.

    Args:
        queue: the one that the entry was read from.
        request_id: names the state, the reply stream and the cancel flag.
        entry_id: the queue entry's.
        worker: the consumer's name.
        instance: the process's.
        ttl_ms: the state and the reply stream expire after this.
        gone_entry: an earlier answer's `other_entry`, once it is known that no such entry exists.
        tenant: whom the request is for.
        digest: of the worker's model; "": unknown, and not compared.
        any_model: whether to claim, and end, a reply that another model began.
        timeout_ms: time after the enqueue when the request is over; one that is over or cancelled is claimed with any
            model.
        only_over: whether to leave a request alone that is neither.
        arithmetic: of the worker; "": unknown, which is a kind of its own.
        any_arithmetic: what to do with a reply that another arithmetic began; "": it is not claimed, unless it is
            over or cancelled, and only to be ended.
    """
    leap = secrets.randbits(_LEAP_BITS)
    of_claim = (entry_id, worker, instance, ttl_ms, gone_entry, leap, MAX_EPOCH, tenant, digest, int(any_model))
    arguments = (*of_claim, "" if timeout_ms is None else timeout_ms, int(only_over), arithmetic, any_arithmetic)
    return call(_CLAIM, _request_keys(queue, request_id), arguments)


def parse_claim(answer: Any, instance: str, arithmetic: str = "") -> Claim | NotClaimed:
    """Parses the claim script's answer to the process `instance`, whose arithmetic is given."""
    reason = answer[0].decode()
    if reason == "ok":
        epoch, has_journal, is_cancelled, now_ms, first_ms, *rest = answer[1:]
        attempts, crashes, strikes, handbacks, is_of_other, before, worker, was_held, is_exact = rest
        earlier = EarlierClaim(before, worker.decode(errors="replace"), bool(was_held)) if before else None
        known = (epoch, instance, bool(has_journal), bool(is_cancelled), now_ms, first_ms)
        counts = (attempts, crashes, strikes, handbacks)
        return Claim(*known, *counts, is_of_other == 1, is_of_other == 2, bool(is_exact), arithmetic, earlier)
    if reason in ("other_model", "other_arithmetic"):
        return NotClaimed(reason, "", "", *(part.decode(errors="replace") for part in answer[1:]))
    if reason == "duplicate":
        return NotClaimed("duplicate", answer[1].decode(errors="replace"))
    if reason == "junk":
        return NotClaimed("junk", field=answer[1].decode())
    return NotClaimed(reason)


def finish(
    queue: str,
    request_id: str,
    *,
    claim: Claim,
    last_number: int,
    status: Literal["done", "dead"],
    ttl_ms: int,
    entries: Iterable[tuple[int, FlatFields]],
) -> Command:
    """Appends the last entries of a reply and closes it, all or nothing.

    Answers ok or already; fenced, if the request has another owner; lost, if the reply does not end with this owner's
    last entry.

    Args:
        queue: the one that the request came from.
        request_id: names the keys.
        claim: this worker's.
        last_number: n of the last entry that Redis has confirmed.
        status: final status of the request.
        ttl_ms: how long the reply and the state are kept.
        entries: (n of `<epoch>-<n>`, fields) of each entry, the `end` last.
    """
    arguments: list[str | bytes | int] = [claim.epoch, claim.instance, last_number, status, ttl_ms]
    for number, fields in entries:
        arguments += (number, len(fields), *fields)
    return call(_FINISH, _request_keys(queue, request_id), arguments)


def end_unclaimed(queue: str, request_id: str, *, ttl_ms: int, fields: FlatFields) -> Command:
    """Ends the reply to a request that can't be claimed, unless it has ended. Answers ok, already or unwritable."""
    return call(_END_UNCLAIMED, (keys.reply(queue, request_id),), (ttl_ms, MAX_EPOCH, *fields))


def return_request(queue: str, request_id: str, *, epoch: int, handbacks: int) -> Command:
    """Hands the request back. Answers 1, or 0 if `epoch` is not the owner's.

    A later death of the worker does not count as a crash of this request. `handbacks` is added to its count.
    """
    return call(_RETURN, (keys.state(queue, request_id),), (epoch, handbacks))


def absolve(queue: str, request_id: str, *, epoch: int) -> Command:
    """Uncounts the crash that was counted when another worker claimed the request: its owner was only slow.

    Answers 1, or 0 if that was done already, or the request has ended.
    """
    return call(_ABSOLVE, (keys.state(queue, request_id),), (epoch,))


def newest(queue: str, request_id: str) -> Command:
    """Asks for a request's owner and the end of its reply; read the answer with `parse_standing`."""
    return call(_NEWEST, _request_keys(queue, request_id)[:2], ())


def find(queue: str, request_id: str, entry_id: str) -> Command:
    """Asks like `newest`, but for the reply's first entry from `entry_id` on, with its fields."""
    return call(_FIND, _request_keys(queue, request_id)[:2], (entry_id,))


def parse_standing(answer: Any) -> ClaimState:
    epoch, instance, *entry = answer  # without an entry if there is none: a nil in Lua ends the list
    return ClaimState(
        owner=None if epoch is None or instance is None else (_text(epoch), _text(instance)),
        entry_id=entry[0].decode() if entry else None,
        fields=tuple(entry[1]) if len(entry) > 1 else (),
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _request_keys(queue: str, request_id: str) -> tuple[str, str, str]:
    return keys.state(queue, request_id), keys.reply(queue, request_id), keys.cancel(queue, request_id)
