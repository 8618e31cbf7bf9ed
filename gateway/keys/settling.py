"""Sees to it that each tab is charged what its reply has, and closed when that ends.

Who reads a reply to its end closes its tab. One that nobody reads any more, of a gateway that was killed too, is looked
at by some gateway until its reply has ended. While a reply goes on, what it has beyond its reservation is charged every
second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from penstock.gateway.keys.limits import Lease, Limiter, OverLimit, Usage
from penstock.gateway.keys.published import Published
from penstock.gateway.keys.records import Limits
from penstock.gateway.keys.tabs import Order, Tab, TabStore, check_size
from penstock.gateway.standing import Standing
from penstock.producer import PenstockError
from penstock.producer.redis.enqueue import Execute
from penstock.producer.tasks import end_tasks

_log = structlog.get_logger(__name__)

ROUND_S = 1.0
"""Between two looks at a reply that grows, and between two charges of one that is read."""

ATTENDED_S = 15.0
"""For how long nobody looks at a tab whose reply is read. It is put off three times as often."""

WAITING_S = 5.0
"""Between two looks at a request that does not run. One that is unknown so long after its sender left is never sent."""

SOON_S = 0.3
"""After which a request that was just left is looked at: most end then, because they are cancelled."""

LOOK_LEASE_S = 10.0
MAX_DUE = 100  # that one gateway takes on at a time
MAX_TURNS = 20  # in a round
RETRY_S = 0.5
_PART = "tabs"

Look = Callable[[str, str], Awaitable[Published]]
"""What is known of the reply to a request (queue, id)."""


@dataclass(slots=True)
class _Reading:
    """A tab whose reply is read here."""

    charged: float  # tokens, at least: fewer need not be said
    num_readers: int = 0
    come: int = 0  # tokens


class Settling:
    """One process's.

    Args:
        execute: sends one command, which may run twice.
        look: at a reply.
        standing: is told what is wrong with Redis.
    """

    def __init__(self, execute: Execute, look: Look, standing: Standing) -> None:
        self._store = TabStore(execute)
        self._look = look
        self._standing = standing
        self._readings: dict[Tab, _Reading] = {}
        self._put_off_s = 0.0  # on the loop's clock: when what is read is to be put off again

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Settles within the block."""
        task = asyncio.create_task(self._keep_going())
        try:
            yield
        finally:
            await end_tasks([task])

    async def open(self, limiter: Limiter, lease: Lease, limits: Limits, orders: Sequence[Order]) -> Usage | None:
        """Opens a tab for each order, or none, in place of the lease; answers how many tokens are used after it.

        Raises:
            OverLimit: the key would have used more tokens in this minute, or have more running, than it may.
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        usage = await self.reserve(lease.key_id, limits, orders, lease.id)
        limiter.replaced(lease)
        return usage

    async def reserve(self, key_id: str, limits: Limits, orders: Sequence[Order], lease_id: str = "") -> Usage | None:
        """As `open`, for what has no lease."""
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
        for order in orders:  # nothing is awaited from here on: whoever is cancelled leaves no reading behind
            charged = math.inf if usage is None else order.num_tokens if is_all_charged else 0
            self._readings.setdefault(order.tab, _Reading(charged)).num_readers += 1
        return usage

    async def settle_ended(self, tab: Tab) -> bool:
        """Whether the reply has ended. If so, its tab is closed by now.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        return await self._look_at(tab, then_s=None, is_left=False)

    def come(self, tab: Tab, num_tokens: int) -> None:
        """A reader here has seen so many tokens of the reply in all."""
        reading = self._readings.get(tab)
        if reading is not None:
            reading.come = max(reading.come, num_tokens)

    async def close(self, tab: Tab, num_tokens: int) -> None:
        """The reply has ended with so many. Where Redis is away, somebody looks later."""
        self._forget_reader(tab)
        with suppress(PenstockError):
            await self._store.charge(tab, num_tokens, is_over=True)

    async def leave(self, tab: Tab) -> None:
        """A reader here has gone before the end, or has seen the reply fail."""
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
        """Whether any of the key's requests that count as running has ended. Where there are many, it looks at some."""
        tabs = await self._store.some_open(key_id)
        are_over = await asyncio.gather(*(self._look_at(tab, then_s=None, is_left=False) for tab in tabs))
        await self._store.remember([tab for tab, is_over in zip(tabs, are_over, strict=True) if not is_over])
        return any(are_over)

    async def _look_at(self, tab: Tab, *, then_s: float | None, is_left: bool) -> bool:
        """Charges what there is; answers whether that is all.

        Args:
            tab: an open one, or one that was.
            then_s: when to look again while it runs; None: as was arranged.
            is_left: nobody is about to send it.
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
        """All of it is done, whatever goes wrong with some tabs; then the first error is raised.

        Args:
            is_well: the round before was. If not, it waits until other gateways have said too which tabs they read.
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
