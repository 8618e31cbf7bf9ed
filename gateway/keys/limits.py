"""Limits of a key. The counters are in Redis, shared by all gateways.

A request that is being answered holds a lease, which its gateway renews: a killed gateway's leases lapse. Once its
requests to the queue are known, it holds tabs instead (`tabs`).
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
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.standing import RedisHealth
from penstock.gateway.store import names
from penstock.producer import PenstockError
from penstock.protocol import lua
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.tasks import end_tasks

_log = structlog.get_logger(__name__)

LEASE_S = 15.0
RENEWALS_A_LEASE = 3
RETRY_S = 0.5
KEPT_S = 3600
"""How long a lapsed lease is remembered: a gateway that was cut off from Redis may come back."""

OPEN_S = 8 * 86_400
"""Longest time that a tab stays open: longer than a request may take."""

TOO_MANY_AT_ONCE = 2
"""The scripts' answer if too many requests are running."""

_PART = "limits"
_ADMIT = lua.load("penstock.gateway.keys", "admit")
_RENEW = lua.load("penstock.gateway.keys", "renew")


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Use of one limit in this minute."""

    limit: int
    used: int
    reset_ms: int  # until it has fully reset

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)


class OverLimit(ApiError):
    """A 429 error, with the use of the limit if that is per minute. Without `wait_ms`, waiting never helps."""

    def __init__(self, message: str, wait_ms: int | None, usage: LimitUsage | None = None) -> None:
        retry_after_s = None if wait_ms is None else max(1, math.ceil(wait_ms / 1000))
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.usage = usage


@dataclass(frozen=True, slots=True)
class RequestLease:
    """Lease of a request that is being answered."""

    key_id: str
    id: str
    requests: LimitUsage | None  # None: no limit per minute


ForgetEnded: TypeAlias = Callable[[str], Awaitable[bool]]
"""Checks whether requests of a key that counted as running have ended, and returns whether any has."""


class Limiter:
    """Enforces the limits of keys.

    Args:
        execute: sends one command, which may run twice.
        forget_ended: called when a key is at its limit of concurrent requests.
        standing: notified of trouble with Redis.
        lease_s: how long a request counts as running without renewal.
    """

    def __init__(
        self, execute: Execute, forget_ended: ForgetEnded, standing: RedisHealth, *, lease_s: float = LEASE_S
    ) -> None:
        self._execute = execute
        self._forget_ended = forget_ended
        self._standing = standing
        self._lease_s = lease_s
        self._open: dict[str, set[str]] = {}  # leases by key
        self._has_open = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renews leases during the block."""
        task = asyncio.create_task(self._keep_renewing())
        try:
            yield
        finally:
            await end_tasks([task])

    async def admit(self, key_id: str, limits: KeyLimits, joined_id: str = "") -> RequestLease:
        """Admits a request.

        Args:
            key_id: the caller's key.
            limits: the key's limits.
            joined_id: the queue id of a repeated request: while that runs, the repetition adds no running request.

        Raises:
            OverLimit: the key is at its limit of requests per minute, or of concurrent requests.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        return await self._try_to_admit(key_id, secrets.token_hex(8), limits, joined_id)

    async def _try_to_admit(self, key_id: str, lease_id: str, limits: KeyLimits, joined_id: str) -> RequestLease:
        per_minute, at_once = limits.requests_per_minute, limits.max_concurrent
        command = lua.call(
            _ADMIT,
            (names.key_requests(key_id), names.key_running(key_id), names.key_open(key_id)),
            (lease_id, per_minute or 0, at_once or 0, self._lease_ms, KEPT_S * 1000, OPEN_S, joined_id),
        )
        refusal, count, wait_ms, used, reset_ms, joins = await self._execute(*command)
        if refusal == TOO_MANY_AT_ONCE and await self._forget_ended(key_id):
            return await self._try_to_admit(key_id, lease_id, limits, joined_id)
        usage = None if per_minute is None else LimitUsage(per_minute, used, reset_ms)
        if refusal == TOO_MANY_AT_ONCE:
            message = f"{count} requests are running, API key {key_id} may have {at_once} at once"
            raise OverLimit(message, wait_ms, usage)
        if refusal:
            message = f"{count} requests in the last minute, API key {key_id} may make {per_minute}"
            raise OverLimit(message, wait_ms, usage)
        if not joins:
            self._open.setdefault(key_id, set()).add(lease_id)
            self._has_open.set()
        return RequestLease(key_id, lease_id, usage)

    def replaced(self, lease: RequestLease) -> None:
        """Stops renewing a lease, as tabs count instead of it."""
        leases = self._open.get(lease.key_id, set())
        leases.discard(lease.id)
        if not leases:
            self._open.pop(lease.key_id, None)

    async def release(self, lease: RequestLease) -> None:
        """Ends a lease; if Redis is away, it lapses."""
        self.replaced(lease)
        with suppress(PenstockError):
            await self._execute("ZREM", names.key_running(lease.key_id), lease.id)

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
        """Renews a key's leases. Returns whether that succeeded."""
        try:
            keys = (names.key_running(key_id),)
            await self._execute(*lua.call(_RENEW, keys, (self._lease_ms, KEPT_S * 1000, *leases)))
        except Exception as error:  # whatever it is: all keys depend on this task
            if not self._standing.lost(error, _PART):
                _log.warning("leases_not_renewed", key=key_id, error=str(error))
            return False
        return True

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_s * 1000)
