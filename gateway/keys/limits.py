"""How much a key may ask for: what counts is in Redis, the same for all gateways.

A request that is answered holds a lease, which its gateway renews: that of a gateway which was killed lapses. One that
goes on in the background counts until its reply has ended, at which somebody looks once the key is at its limit.

Tokens are charged before a request goes to the queue, as an estimate, and settled when the reply has told how many
there were; what a killed gateway did not settle stays charged.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from penstock.gateway.errors import ApiError
from penstock.gateway.keys.records import Limits
from penstock.gateway.standing import Standing
from penstock.gateway.store import names
from penstock.producer import PenstockError
from penstock.producer.redis import lua
from penstock.producer.redis.enqueue import Execute
from penstock.producer.tasks import end_tasks

LEASE_S = 15.0
RENEWALS_A_LEASE = 3
RETRY_S = 0.5
KEPT_S = 3600
"""For how long a lease that lapsed, or a charge, is known: a gateway that was cut off from Redis may come back."""

BACKGROUND_S = 7 * 86_400
"""For how long a request in the background counts at most, which is as long as it may take."""

MAX_LOOKED_AT = 16

_PART = "limits"
_TOO_MANY_AT_ONCE = 2
_ADMIT = lua.load("penstock.gateway.keys", "clock", "window", "admit")
_RELEASE = lua.load("penstock.gateway.keys", "clock", "release")
_RENEW = lua.load("penstock.gateway.keys", "clock", "renew")
_RESERVE = lua.load("penstock.gateway.keys", "clock", "window", "reserve")
_SETTLE = lua.load("penstock.gateway.keys", "clock", "window", "settle")


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of one limit is used in this minute."""

    limit: int
    used: int
    reset_ms: int  # until nothing of it counts

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)


class OverLimit(ApiError):
    """429, with how much of the limit is used where it is one of a minute."""

    def __init__(self, message: str, wait_ms: int, usage: Usage | None = None) -> None:
        retry_after_s = max(1, math.ceil(wait_ms / 1000))
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.usage = usage


@dataclass(frozen=True, slots=True)
class Lease:
    """A request that is answered."""

    key_id: str
    id: str
    requests: Usage | None  # None: any number may come in a minute


@dataclass(frozen=True, slots=True)
class BackgroundRequest:
    """What goes on without anybody who waits for it."""

    queue: str
    id: str

    @property
    def member(self) -> str:
        """In Redis; neither a queue's name nor an id has a space."""
        return f"{self.queue} {self.id}"


HasEnded: TypeAlias = Callable[[BackgroundRequest], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Charge:
    """About so many tokens, for one request to the queue."""

    key_id: str
    id: str
    num_tokens: int
    per_minute: int
    is_shared: bool  # among all who ask for this request: they pay for it once


def new_charge(key_id: str, num_tokens: int, per_minute: int, shared_id: str | None = None) -> Charge:
    """One of more than the limit is one of the limit, and needs a minute without any other.

    Args:
        key_id: who is charged.
        num_tokens: about so many.
        per_minute: the limit.
        shared_id: of a request that others may ask for too; None: nobody can.
    """
    charge_id = shared_id or secrets.token_hex(8)
    return Charge(key_id, charge_id, min(num_tokens, per_minute), per_minute, is_shared=shared_id is not None)


class Limiter:
    """
    Args:
        execute: sends one command, which may run twice.
        has_ended: whether the reply of a request in the background has.
        standing: is told what is wrong with Redis.
        lease_s: for how long a request counts as running without a renewal.
    """

    def __init__(self, execute: Execute, has_ended: HasEnded, standing: Standing, *, lease_s: float = LEASE_S) -> None:
        self._execute = execute
        self._has_ended = has_ended
        self._standing = standing
        self._lease_s = lease_s
        self._open: dict[str, set[str]] = {}  # leases by key
        self._has_open = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renews leases within the block."""
        task = asyncio.create_task(self._keep_renewing())
        try:
            yield
        finally:
            await end_tasks([task])

    async def admit(self, key_id: str, limits: Limits) -> Lease:
        """
        Raises:
            OverLimit: the key has as many requests in this minute, or running, as it may.
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        lease_id = secrets.token_hex(8)
        usage = await self._try_to_admit(key_id, lease_id, limits)
        self._open.setdefault(key_id, set()).add(lease_id)
        self._has_open.set()
        return Lease(key_id, lease_id, usage)

    async def _try_to_admit(self, key_id: str, lease_id: str, limits: Limits) -> Usage | None:
        per_minute, at_once = limits.requests_per_minute, limits.max_concurrent
        command = lua.call(
            _ADMIT,
            (names.key_requests(key_id), names.key_running(key_id), names.key_background(key_id)),
            (lease_id, per_minute or 0, at_once or 0, self._lease_ms, KEPT_S * 1000),
        )
        refusal, count, wait_ms, used, reset_ms = await self._execute(*command)
        if refusal == _TOO_MANY_AT_ONCE and await self._forget_ended(key_id):
            return await self._try_to_admit(key_id, lease_id, limits)
        usage = None if per_minute is None else Usage(per_minute, used, reset_ms)
        if refusal == _TOO_MANY_AT_ONCE:
            message = f"{count} requests are running, API key {key_id} may have {at_once} at once"
            raise OverLimit(message, wait_ms, usage)
        if refusal:
            message = f"{count} requests in the last minute, API key {key_id} may make {per_minute}"
            raise OverLimit(message, wait_ms, usage)
        return usage

    async def _forget_ended(self, key_id: str) -> bool:
        """Whether a request in the background no longer counts. Where there are many, it looks at some."""
        members = await self._execute("ZRANDMEMBER", names.key_background(key_id), MAX_LOOKED_AT)
        parts = [member.decode(errors="replace").split(" ", 1) for member in members]
        there = [BackgroundRequest(*each) for each in parts if len(each) == 2]
        have_ended = await asyncio.gather(*map(self._has_ended, there))
        ended = [request.member for request, has_ended in zip(there, have_ended, strict=True) if has_ended]
        if ended:
            await self._execute("ZREM", names.key_background(key_id), *ended)
        return bool(ended)

    async def release(self, lease: Lease, goes_on: BackgroundRequest | None = None) -> None:
        """Ends a lease; where Redis is away, it lapses. What goes on in the background counts instead of it."""
        leases = self._open.get(lease.key_id, set())
        leases.discard(lease.id)
        if not leases:
            self._open.pop(lease.key_id, None)
        keys = (names.key_running(lease.key_id), names.key_background(lease.key_id))
        more = () if goes_on is None else (goes_on.member, BACKGROUND_S * 1000)
        with suppress(PenstockError):
            await self._execute(*lua.call(_RELEASE, keys, (lease.id, *more)))

    async def reserve(self, charge: Charge) -> Usage:
        """How much is used after it.

        Raises:
            OverLimit: the key would have used more tokens in this minute than it may.
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        keys = (names.key_tokens(charge.key_id), names.key_charges(charge.key_id))
        command = lua.call(_RESERVE, keys, (charge.id, charge.num_tokens, charge.per_minute, KEPT_S))
        is_reserved, used, wait_ms = await self._execute(*command)
        usage = Usage(charge.per_minute, used, wait_ms)
        if is_reserved:
            return usage
        needed = f"{used} tokens in the last minute and about {charge.num_tokens} more"
        raise OverLimit(f"{needed}: API key {charge.key_id} may use {charge.per_minute}", wait_ms, usage)

    async def settle(self, charge: Charge, num_tokens: int) -> None:
        """Makes a charge one of `num_tokens`, once; where Redis is away, it stays as it was."""
        keys = (names.key_tokens(charge.key_id), names.key_charges(charge.key_id))
        arguments = (charge.id, num_tokens - charge.num_tokens, int(charge.is_shared))
        with suppress(PenstockError):
            await self._execute(*lua.call(_SETTLE, keys, arguments))

    async def _keep_renewing(self) -> None:
        pause_s = self._lease_s / RENEWALS_A_LEASE
        is_well = True
        while True:
            await self._has_open.wait()
            await asyncio.sleep(pause_s if is_well else min(RETRY_S, pause_s))
            if not self._open:
                self._has_open.clear()
            renewals = [self._renew(key_id, tuple(leases)) for key_id, leases in self._open.items()]
            is_well = all(await asyncio.gather(*renewals))
            if is_well:
                self._standing.ready(_PART)

    async def _renew(self, key_id: str, leases: Sequence[str]) -> bool:
        """Whether it could."""
        try:
            keys = (names.key_running(key_id),)
            await self._execute(*lua.call(_RENEW, keys, (self._lease_ms, KEPT_S * 1000, *leases)))
        except Exception as error:  # whatever it is: all keys depend on this task
            if not self._standing.lost(error, _PART):
                structlog.get_logger().warning("leases_not_renewed", key=key_id, error=str(error))
            return False
        return True

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_s * 1000)
