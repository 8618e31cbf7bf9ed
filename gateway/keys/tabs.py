"""Tabs: what requests to the queue use of their keys' limits, from before they are sent to the end of their replies.

A tab is opened before its request is sent, with an estimate of its tokens. It is closed with the reply's actual number,
whether or not anybody reads the reply: `settling` sees to it. The counters are in Redis, shared by all gateways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.keys.limits import OPEN_S, TOO_MANY_AT_ONCE, LimitUsage, OverLimit
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.store import names
from penstock.protocol import lua
from penstock.protocol.queue.enqueue import Execute

PAID_S = 3600
"""How long a request is known to be paid for. After that its reply shows it, if that still exists."""

MAX_LOOKED_AT = 16

_RESERVE = lua.load("penstock.gateway.keys", "reserve")
_SETTLE = lua.load("penstock.gateway.keys", "settle")
_PUT_OFF = lua.load("penstock.gateway.keys", "put_off")
_DUE = lua.load("penstock.gateway.keys", "due")


@dataclass(frozen=True, slots=True)
class Tab:
    """Name of a tab; its request is `request_id` in `queue`."""

    key_id: str
    queue: str
    request_id: str
    is_shared: bool = True  # all who repeat this request share it, and pay for it once

    @property
    def field(self) -> str:
        """Field in the hash of the key's open tabs; neither a queue's name nor an id has a space."""
        return f"{self.queue} {self.request_id}"

    @property
    def member(self) -> str:
        """Member in the set of all keys' open tabs."""
        return f"{self.key_id} {self.field}"


@dataclass(frozen=True, slots=True)
class Order:
    """A request that is about to be sent."""

    tab: Tab
    num_at_once: int  # sequences it consists of; 0: it does not count as running
    num_least: int  # tokens without which it is not sent; `num_tokens` if its client has set a limit
    num_tokens: int  # estimate of the most it may use


class TabStore:
    """Stores tabs.

    Args:
        execute: sends one command, which may run twice; answers are bytes.
    """

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    async def open(self, key_id: str, limits: KeyLimits, orders: Sequence[Order], lease_id: str) -> _Answer:
        """Opens the tabs of all orders in place of the lease, or none. They must be put off first: an open tab is
        always among those to be checked.
        """
        keys = (names.key_tokens(key_id), names.key_charges(key_id), names.key_running(key_id), names.key_open(key_id))
        arguments: list[str | int] = [limits.tokens_per_minute or 0, limits.max_concurrent or 0]
        arguments += [lease_id, OPEN_S]
        for order in orders:
            arguments += (order.tab.field, order.num_at_once)
            arguments += ("-", "-") if limits.tokens_per_minute is None else (order.num_least, order.num_tokens)
        return _Answer(*await self._execute(*lua.call(_RESERVE, keys, arguments)))

    async def charge(self, tab: Tab, num_tokens: int | None, *, is_over: bool) -> None:
        """Charges what a tab's request has used in all (None: unknown, and the reservation stands).

        Args:
            tab: an open one; others are ignored.
            num_tokens: a smaller number than before is ignored, unless it is over.
            is_over: whether the number is final. This closes the tab.
        """
        keys = (names.key_tokens(tab.key_id), names.key_charges(tab.key_id), names.key_open(tab.key_id))
        total = "" if num_tokens is None else num_tokens
        is_paid = tab.is_shared and num_tokens != 0  # one that used nothing may yet be sent by a repetition
        arguments = (tab.field, total, int(is_over), int(is_paid), PAID_S)
        await self._execute(*lua.call(_SETTLE, keys, arguments))
        if is_over:
            await self.forget([tab])

    async def forget(self, tabs: Sequence[Tab]) -> None:
        """Removes tabs that are not open from those to be checked."""
        if tabs:
            await self._execute("ZREM", names.unsettled(), *(tab.member for tab in tabs))

    async def remember(self, tabs: Sequence[Tab]) -> None:
        """Adds open tabs to those to be checked: at once if Redis has lost the time."""
        if tabs:
            due = (part for tab in tabs for part in (0, tab.member))
            await self._execute("ZADD", names.unsettled(), "NX", *due)

    async def put_off(self, after_s: float, tabs: Sequence[Tab]) -> None:
        """Puts off the check of these tabs until `after_s` from now."""
        if tabs:
            arguments: list[str | int] = [round(after_s * 1000), OPEN_S, *(tab.member for tab in tabs)]
            await self._execute(*lua.call(_PUT_OFF, (names.unsettled(),), arguments))

    async def take_due(self, count: int, lease_s: float, furthest_s: float) -> list[Tab]:
        """Returns up to `count` tabs to check, which nobody else gets for `lease_s`. Invalid names are dropped."""
        limits = (count, round(lease_s * 1000), round(furthest_s * 1000))
        members: list[bytes] = await self._execute(*lua.call(_DUE, (names.unsettled(),), limits))
        tabs = [_tab(member) for member in members]
        wrong = [member for member, tab in zip(members, tabs, strict=True) if tab is None]
        if wrong:
            await self._execute("ZREM", names.unsettled(), *wrong)
        return [tab for tab in tabs if tab is not None]

    async def some_open(self, key_id: str) -> list[Tab]:
        """Returns open tabs of a key; if there are many, some of them."""
        fields: list[bytes] = await self._execute("HKEYS", names.key_open(key_id))
        some = random.sample(fields, min(len(fields), MAX_LOOKED_AT))
        tabs = (_tab(key_id.encode() + b" " + field) for field in some)
        return [tab for tab in tabs if tab is not None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of `reserve.lua`."""

    refusal: int
    count: int
    more: int
    wait_ms: int
    used: int
    reset_ms: int
    num_charged: int  # tokens charged to the tabs that were opened

    @property
    def is_too_many_at_once(self) -> bool:
        return self.refusal == TOO_MANY_AT_ONCE

    def usage(self, key_id: str, limits: KeyLimits) -> LimitUsage | None:
        """Returns the use of the token limit; None: there is no limit.

        Raises:
            OverLimit: the limits were exceeded.
        """
        per_minute = limits.tokens_per_minute
        usage = None if per_minute is None else LimitUsage(per_minute, self.used, self.reset_ms)
        if self.is_too_many_at_once:
            more = "" if self.more == 1 else f", and {self.more} more are asked for"
            running, at_once = f"{self.count} requests are running{more}", limits.max_concurrent
            raise OverLimit(f"{running}, API key {key_id} may have {at_once} at once", self.wait_ms, usage)
        if self.refusal:
            needed = f"{self.count} tokens in the last minute and about {self.more} more"
            raise OverLimit(f"{needed}: API key {key_id} may use {per_minute}", self.wait_ms, usage)
        return usage


def check_size(key_id: str, limits: KeyLimits, orders: Sequence[Order]) -> None:
    """Checks that the orders could ever be admitted.

    Raises:
        OverLimit: they are more sequences than the limit on concurrent requests.
    """
    wanted, at_once = sum(order.num_at_once for order in orders), limits.max_concurrent
    if at_once is not None and wanted > at_once:
        message = f"{wanted} are asked for at once (n for each prompt): API key {key_id} may have {at_once} at once"
        raise OverLimit(message, None)


def _tab(member: bytes) -> Tab | None:
    """Parses a tab's name; None: it is not one."""
    try:
        key_id, queue, request_id = member.decode().split(" ")
    except ValueError:  # including UnicodeDecodeError
        return None
    is_name = key_id and queue and request_id and not set("{}") & set(key_id)
    return Tab(key_id, queue, request_id) if is_name else None
