"""Handles a permanent refusal by Redis, by password or by the user's permissions, in a process that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import RedisClient, renew_connections
from penstock.protocol.redis.credentials import Credentials
from penstock.serving.readiness import Readiness

_log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0


class Refusals:
    """Keeps the process waiting until the cause is fixed: by the operator of Redis, or by new credentials at their
    source. After a set time the process must drain, so that its supervisor sees that it cannot go on.

    Args:
        clients: all clients of the process; more may come.
        address: where they lead, and where user and password are read again.
        drain_after_s: how long Redis may refuse.
        readiness: the process's, which knows of refusals.

    Attributes:
        must_drain: set once the time is over.
        refusal: what Redis said, from then on.
    """

    def __init__(
        self, clients: Collection[RedisClient], address: Address, drain_after_s: float, readiness: Readiness
    ) -> None:
        self._clients = clients
        self._credentials = Credentials(address)
        self._drain_after_s = drain_after_s
        self._readiness = readiness
        self.must_drain = asyncio.Event()
        self.refusal: Exception | None = None

    async def run(self) -> None:
        """Runs until cancelled. Failed connections are replaced at their next use; the rest are replaced here."""
        while True:
            await self._readiness.refused.wait()
            await self._renew()
            refused_for_s, refusal = self._readiness.refused_for_s, self._readiness.refusal
            if self.refusal is None and refusal is not None and refused_for_s > self._drain_after_s:
                self.refusal = refusal
                _log.error("refused_for_too_long", for_s=round(refused_for_s), error=str(refusal))
                self.must_drain.set()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _renew(self) -> None:
        if await self._credentials.look():
            _log.info("credentials_changed")
            for redis in self._clients:
                renew_connections(redis)
