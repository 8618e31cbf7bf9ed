"""What requests to the queue take of their keys' limits, from before they are sent to the end of their replies.

A tab is opened before its request is sent, with about the tokens that it may take, and is closed with those that its
reply has, whoever reads that and whoever has left: `settling` sees to it. What counts is in Redis, the same for all
gateways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.keys.limits import OPEN_S, TOO_MANY_AT_ONCE, OverLimit, Usage
from penstock.gateway.keys.records import Limits
from penstock.gateway.store import names
from penstock.producer.redis import lua
from penstock.producer.redis.enqueue import Execute

PAID_S = 3600
"""For how long it is known that a request is paid for. After that its reply says so, if it is still there."""

MAX_LOOKED_AT = 16

_RESERVE = lua.load("penstock.gateway.keys", "clock", "window", "open", "reserve")
_SETTLE = lua.load("penstock.gateway.keys", "clock", "window", "open", "settle")
_PUT_OFF = lua.load("penstock.gateway.keys", "clock", "put_off")
_DUE = lua.load("penstock.gateway.keys", "clock", "due")


@dataclass(frozen=True, slots=True)
class Tab:
    """The name of one; its request is `request_id` in `queue`."""

    key_id: str
    queue: str
    request_id: str
    is_shared: bool = True  # among all who ask for this request: they pay for it once

    @property
    def field(self) -> str:
        """Of the key's open tabs; neither a queue's name nor an id has a space."""
        return f"{self.queue} {self.request_id}"

    @property
    def member(self) -> str:
        """Of those of all keys."""
        return f"{self.key_id} {self.field}"


@dataclass(frozen=True, slots=True)
class Order:
    """A request that is about to be sent."""

    tab: Tab
    num_at_once: int  # sequences that it is; 0: it does not count as running
    num_least: int  # tokens that it is not sent without; `num_tokens` if its client has said how many it wants
    num_tokens: int  # about so many, at most


class TabStore:
    """
    Args:
        execute: sends one command, which may run twice; answers are bytes.
    """

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    async def open(self, key_id: str, limits: Limits, orders: Sequence[Order], lease_id: str) -> _Answer:
        """Opens the tabs of all orders in place of the lease, or none. They are to be put off before: a tab that is
        open is among those that somebody looks at.
        """
        keys = (names.key_tokens(key_id), names.key_charges(key_id), names.key_running(key_id), names.key_open(key_id))
        arguments: list[str | int] = [limits.tokens_per_minute or 0, limits.max_concurrent or 0]
        arguments += [lease_id, OPEN_S]
        for order in orders:
            arguments += (order.tab.field, order.num_at_once)
            arguments += ("-", "-") if limits.tokens_per_minute is None else (order.num_least, order.num_tokens)
        return _Answer(*await self._execute(*lua.call(_RESERVE, keys, arguments)))

    async def charge(self, tab: Tab, num_tokens: int | None, *, is_over: bool) -> None:
        """What a tab's request has taken in all (None: nobody knows, and it stays as it was reserved).

        Args:
            tab: an open one; of another nothing happens.
            num_tokens: less than before is taken for as much as before, unless it is over.
            is_over: whether it takes no more. This closes the tab.
        """
        keys = (names.key_tokens(tab.key_id), names.key_charges(tab.key_id), names.key_open(tab.key_id))
        total = "" if num_tokens is None else num_tokens
        is_paid = tab.is_shared and num_tokens != 0  # one that took nothing may be sent yet, by who asks again
        arguments = (tab.field, total, int(is_over), int(is_paid), PAID_S)
        await self._execute(*lua.call(_SETTLE, keys, arguments))
        if is_over:
            await self.forget([tab])

    async def forget(self, tabs: Sequence[Tab]) -> None:
        """Nobody is to look at these: they are not open."""
        if tabs:
            await self._execute("ZREM", names.unsettled(), *(tab.member for tab in tabs))

    async def remember(self, tabs: Sequence[Tab]) -> None:
        """Somebody is to look at these, which are open: at once if Redis has lost when."""
        if tabs:
            due = (part for tab in tabs for part in (0, tab.member))
            await self._execute("ZADD", names.unsettled(), "NX", *due)

    async def put_off(self, after_s: float, tabs: Sequence[Tab]) -> None:
        """Somebody is to look at these tabs, but not before `after_s` from now."""
        if tabs:
            arguments: list[str | int] = [round(after_s * 1000), OPEN_S, *(tab.member for tab in tabs)]
            await self._execute(*lua.call(_PUT_OFF, (names.unsettled(),), arguments))

    async def take_due(self, count: int, lease_s: float, furthest_s: float) -> list[Tab]:
        """Up to `count` tabs to look at, which nobody else gets for `lease_s`. What is no tab's name is dropped."""
        limits = (count, round(lease_s * 1000), round(furthest_s * 1000))
        members: list[bytes] = await self._execute(*lua.call(_DUE, (names.unsettled(),), limits))
        tabs = [_tab(member) for member in members]
        wrong = [member for member, tab in zip(members, tabs, strict=True) if tab is None]
        if wrong:
            await self._execute("ZREM", names.unsettled(), *wrong)
        return [tab for tab in tabs if tab is not None]

    async def some_open(self, key_id: str) -> list[Tab]:
        """Open tabs of a key; where there are many, some."""
        fields: list[bytes] = await self._execute("HKEYS", names.key_open(key_id))
        some = random.sample(fields, min(len(fields), MAX_LOOKED_AT))
        tabs = (_tab(key_id.encode() + b" " + field) for field in some)
        return [tab for tab in tabs if tab is not None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Of `reserve.lua`."""

    refusal: int
    count: int
    more: int
    wait_ms: int
    used: int
    reset_ms: int
    num_charged: int  # tokens, to the tabs that were opened

    @property
    def is_too_many_at_once(self) -> bool:
        return self.refusal == TOO_MANY_AT_ONCE

    def usage(self, key_id: str, limits: Limits) -> Usage | None:
        """How much of the tokens is used; None: there is no limit.

        Raises:
            OverLimit: the limits were in the way.
        """
        per_minute = limits.tokens_per_minute
        usage = None if per_minute is None else Usage(per_minute, self.used, self.reset_ms)
        if self.is_too_many_at_once:
            more = "" if self.more == 1 else f", and {self.more} more are asked for"
            running, at_once = f"{self.count} requests are running{more}", limits.max_concurrent
            raise OverLimit(f"{running}, API key {key_id} may have {at_once} at once", self.wait_ms, usage)
        if self.refusal:
            needed = f"{self.count} tokens in the last minute and about {self.more} more"
            raise OverLimit(f"{needed}: API key {key_id} may use {per_minute}", self.wait_ms, usage)
        return usage


def check_size(key_id: str, limits: Limits, orders: Sequence[Order]) -> None:
    """
    Raises:
        OverLimit: so many at once will never be let in.
    """
    wanted, at_once = sum(order.num_at_once for order in orders), limits.max_concurrent
    if at_once is not None and wanted > at_once:
        message = f"{wanted} are asked for at once (n for each prompt): API key {key_id} may have {at_once} at once"
        raise OverLimit(message, None)


def _tab(member: bytes) -> Tab | None:
    """Of its name; None: it is no tab's."""
    try:
        key_id, queue, request_id = member.decode().split(" ")
    except ValueError:  # UnicodeDecodeError too
        return None
    is_name = key_id and queue and request_id and not set("{}") & set(key_id)
    return Tab(key_id, queue, request_id) if is_name else None
