"""Waiting while Redis accepts nothing: for callers that send many requests and must not lose any."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.producer.connections import Connections
from penstock.protocol.errors import ConnectionLost, QueueFull, ServerRefused
from penstock.protocol.redis.clients import CONNECT_TIMEOUT_S

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 1.0


class Patience:
    """Decides how long the requests of one `map` are retried: they all share one outage.

    It waits without limit for a full queue and for a server that refuses for now. A server that was reached before may
    stay away for `reconnect_timeout_s`. One that was never reached is not waited for.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._away_since: float | None = None
        self._is_told = False  # whether this outage has been logged

    async def persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `attempt`, which may run any number of times.

        Raises:
            ConnectionLost: Redis was not reached within `CONNECT_TIMEOUT_S`, or stayed away, or the client was closed.
                Also raised in place of a permanent refusal, if an attempt before it had no answer.
            ServerRefused: Redis refuses permanently.
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
            except asyncio.CancelledError as error:  # a client that closes cancels what it waits for itself
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise ConnectionLost("the client was closed") from error
            else:
                self._end_outage()
                return result
            await asyncio.sleep(random.uniform(0.5, 1.0) * delay_s)
            delay_s = min(MAX_DELAY_S, delay_s * 2)
        raise ConnectionLost("the client was closed")

    @property
    def is_hopeless(self) -> bool:
        """Whether Redis was never reached, so that not just one request failed."""
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
        """Logs the trouble, once per outage."""
        if not self._is_told:
            log.warning("requests wait until Redis takes them: %s", error)
        self._is_told = True

    def _end_outage(self) -> None:
        if self._is_told:
            log.warning("Redis takes requests again")
        self._away_since, self._is_told = None, False
