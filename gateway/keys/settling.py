"""Ensures that each tab is charged with its reply's use, and closed when the reply ends.

The reader of a reply closes its tab at the end. A reply without a reader, including those of a killed gateway, is
checked by some gateway until it has ended. While a reply continues, use beyond its reservation is charged every second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from penstock.gateway.keys.limits import Limiter, LimitUsage, OverLimit, RequestLease
from penstock.gateway.keys.published import Published
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.keys.tabs import Order, Tab, TabStore, check_size
from penstock.gateway.standing import RedisHealth
from penstock.producer import PenstockError
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.tasks import end_tasks

_log = structlog.get_logger(__name__)

ROUND_S = 1.0
"""Time between two checks of a growing reply, and between two charges of one that is being read."""

ATTENDED_S = 15.0
"""Time for which a tab is not checked while its reply is read. It is extended three times as often."""

WAITING_S = 5.0
"""Time between two checks of a request that is not running. One still unknown this long after its sender left was never
sent.
"""

SOON_S = 0.3
"""Delay before checking a request whose reader just left: most end then, because they are cancelled."""

LOOK_LEASE_S = 10.0
MAX_DUE = 100  # tabs that one gateway takes on at a time
MAX_TURNS = 20  # in a round
RETRY_S = 0.5
_PART = "tabs"

_ReadPublished = Callable[[str, str], Awaitable[Published]]
"""Returns what is known of the reply to a request (queue, id)."""


@dataclass(slots=True)
class _Reading:
    """A tab whose reply is read here."""

    charged: float  # tokens, at least: fewer need not be reported
    num_readers: int = 0
    come: int = 0  # tokens seen


class Settling:
    """Settles the tabs of one process.

    Args:
        execute: sends one command, which may run twice.
        look: reads the state of a reply.
        standing: notified of trouble with Redis.
    """

    def __init__(self, execute: Execute, look: _ReadPublished, standing: RedisHealth) -> None:
        self._store = TabStore(execute)
        self._look = look
        self._standing = standing
        self._readings: dict[Tab, _Reading] = {}
        self._put_off_s = 0.0  # on the loop's clock: when to extend the tabs of replies being read

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Settles tabs during the block."""
        task = asyncio.create_task(self._keep_going())
        try:
            yield
        finally:
            await end_tasks([task])

    async def open(
        self, limiter: Limiter, lease: RequestLease, limits: KeyLimits, orders: Sequence[Order]
    ) -> LimitUsage | None:
        """Opens tabs for all orders or for none, in place of the lease; returns the tokens used after that.

        Raises:
            OverLimit: the key would exceed its limit of tokens in this minute, or of concurrent requests.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        usage = await self.reserve(lease.key_id, limits, orders, lease.id)
        limiter.replaced(lease)
        return usage

    async def reserve(
        self, key_id: str, limits: KeyLimits, orders: Sequence[Order], lease_id: str = ""
    ) -> LimitUsage | None:
        """Opens tabs as `open` does, without a lease."""
        check_size(key_id, limits, orders)
        await self._store.put_off(ATTENDED_S, [order.tab for order in orders])
        answer = await self._store.open(key_id, limits, orders, lease_id)
        if answer.is_too_many_at_once and await self.forget_ended(key_id):
            answer = await self._store.open(key_id, limits, orders, lease_id)
        try:
            usage = answer.usage(key_id, limits)
        except OverLimit:
            with suppress(PenstockError):  # nobody else has opened those
                await self._store.forget([order.tab for order in orders if not order.tab.is_shared])
            raise
        is_all_charged = answer.num_charged == sum(order.num_tokens for order in orders)
        for order in orders:  # nothing is awaited from here on: a cancelled caller leaves no reading behind
            charged = math.inf if usage is None else order.num_tokens if is_all_charged else 0
            self._readings.setdefault(order.tab, _Reading(charged)).num_readers += 1
        return usage

    async def settle_ended(self, tab: Tab) -> bool:
        """Returns whether the reply has ended. If so, its tab is closed by now.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        return await self._look_at(tab, then_s=None, is_left=False)

    def come(self, tab: Tab, num_tokens: int) -> None:
        """Notes how many tokens of the reply a reader here has seen in all."""
        reading = self._readings.get(tab)
        if reading is not None:
            reading.come = max(reading.come, num_tokens)

    async def close(self, tab: Tab, num_tokens: int) -> None:
        """Closes the tab of a reply that has ended. If Redis is away, some gateway checks it later."""
        self._forget_reader(tab)
        with suppress(PenstockError):
            await self._store.charge(tab, num_tokens, is_over=True)

    async def leave(self, tab: Tab) -> None:
        """Notes that a reader here has left before the end, or has seen the reply fail."""
        self._forget_reader(tab)
        if tab not in self._readings:
            with suppress(PenstockError):
                await self._look_at(tab, then_s=SOON_S, is_left=False)

    def _forget_reader(self, tab: Tab) -> None:
        reading = self._readings.get(tab)
        if reading is not None:
            reading.num_readers -= 1
            if not reading.num_readers:
                del self._readings[tab]

    async def forget_ended(self, key_id: str) -> bool:
        """Returns whether any of the key's running requests has ended. If there are many, it checks some."""
        tabs = await self._store.some_open(key_id)
        are_over = await asyncio.gather(*(self._look_at(tab, then_s=None, is_left=False) for tab in tabs))
        await self._store.remember([tab for tab, is_over in zip(tabs, are_over, strict=True) if not is_over])
        return any(are_over)

    async def _look_at(self, tab: Tab, *, then_s: float | None, is_left: bool) -> bool:
        """Charges the use so far. Returns whether it is final.

        Args:
            tab: an open one, or a formerly open one.
            then_s: when to look again while it runs; None: no change.
            is_left: whether nobody is about to send it.
        """
        found = await self._look(tab.queue, tab.request_id)
        is_over = found.stage == "ended" or (found.stage == "unknown" and is_left)
        if is_over or found.num_tokens:
            await self._store.charge(tab, found.num_tokens, is_over=is_over)
        if not is_over and then_s is not None:
            await self._store.put_off(then_s if found.stage == "running" else WAITING_S, [tab])
        return is_over

    async def _keep_going(self) -> None:
        is_well = True
        while True:
            await asyncio.sleep(ROUND_S if is_well else RETRY_S)
            try:
                await self._go_round(is_well=is_well)
            except Exception as error:  # whatever it is: the limits of all keys depend on this task
                if not self._standing.lost(error, _PART) and is_well:
                    _log.warning("tabs_not_settled", error=str(error))
                is_well = False
            else:
                is_well = True
                self._standing.ready(_PART)

    async def _go_round(self, *, is_well: bool = True) -> None:
        """Runs a round. Failures with single tabs do not stop it; the first error is raised at the end.

        Args:
            is_well: whether the previous round succeeded. If not, it waits until other gateways have also reported
                which tabs they read.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._put_off_s:
            await self._store.put_off(ATTENDED_S, tuple(self._readings))
            self._put_off_s = now_s + ATTENDED_S / 3
        charges = [self._charge_read(*each) for each in self._readings.items()]
        errors = [error for error in await asyncio.gather(*charges, return_exceptions=True) if error is not None]
        if not is_well:
            await asyncio.sleep(ROUND_S)
        errors += await self._look_at_due()
        if errors:
            raise errors[0]

    async def _look_at_due(self) -> list[BaseException]:
        errors: list[BaseException] = []
        for _ in range(MAX_TURNS):
            due = await self._store.take_due(MAX_DUE, LOOK_LEASE_S, ATTENDED_S)
            read = {tab.member for tab in self._readings}
            looks = [self._look_at(tab, then_s=ROUND_S, is_left=True) for tab in due if tab.member not in read]
            found = await asyncio.gather(*looks, return_exceptions=True)
            errors += [error for error in found if isinstance(error, BaseException)]
            if len(due) < MAX_DUE:
                break
        return errors

    async def _charge_read(self, tab: Tab, reading: _Reading) -> None:
        come = reading.come
        if come > reading.charged:
            await self._store.charge(tab, come, is_over=False)
            reading.charged = come
