"""Waiting while Redis takes nothing: for who sends many requests and has none of them to lose."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.producer.connections import Connections
from penstock.producer.errors import ConnectionLost, QueueFull, ServerRefused
from penstock.producer.redis.clients import CONNECT_TIMEOUT_S

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 1.0


class Patience:
    """How long the requests of one `map` are tried again: an outage is the same for all of them.

    A full queue, and a server that refuses for now, are waited for without end. One that was reached before and is not
    any more may stay away for `reconnect_timeout_s`. One that was never reached is not waited for.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._away_since: float | None = None
        self._is_told = False  # of this outage

    async def persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt`, which may run any number of times, returns in the end.

        Raises:
            ConnectionLost: Redis was never reached, for which it has `CONNECT_TIMEOUT_S`; or it has stayed away; or
                the client was closed. Also in place of a refusal for good, where an attempt before it had no answer.
            ServerRefused: Redis refuses for good.
            Whatever else `attempt` raises.
        """
        delay_s, lost = FIRST_DELAY_S, None
        while not self._connections.is_closed:
            try:
                result = await self._try(attempt)
            except QueueFull:
                self._end_outage()
            except ServerRefused as error:
                self._away_since = None
                if not error.is_passing:
                    raise lost or error from error
                self._tell(error)
            except ConnectionLost as error:
                if not self._may_come_back():
                    raise
                lost = error
                self._tell(error)
            else:
                self._end_outage()
                return result
            await asyncio.sleep(random.uniform(0.5, 1.0) * delay_s)
            delay_s = min(MAX_DELAY_S, delay_s * 2)
        raise ConnectionLost("the client was closed")

    @property
    def is_hopeless(self) -> bool:
        """Whether Redis was never reached: then it is not one request that failed."""
        return not self._connections.has_connected

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        if self._connections.has_connected:
            return await attempt()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as limit:
                return await attempt()
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"no connection to Redis at {self._connections.address}: no answer within {CONNECT_TIMEOUT_S:g} s"
            raise ConnectionLost(message) from error

    def _may_come_back(self) -> bool:
        if not self._connections.has_connected:
            return False
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since < self._connections.reconnect_timeout_s

    def _tell(self, error: ConnectionLost | ServerRefused) -> None:
        """Once per outage."""
        if not self._is_told:
            log.warning("requests wait until Redis takes them: %s", error)
        self._is_told = True

    def _end_outage(self) -> None:
        if self._is_told:
            log.warning("Redis takes requests again")
        self._away_since, self._is_told = None, False
