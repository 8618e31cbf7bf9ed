"""What a process does that serves and is refused by Redis for good, by its password or by what its user may do."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from penstock.producer.redis.address import Address
from penstock.producer.redis.connection import RedisClient, renew_connections
from penstock.producer.redis.credentials import Credentials
from penstock.producer.serving.readiness import Readiness

_log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0


class Refusals:
    """Waits with the process until it is cured: by who runs Redis, or by other credentials where these came from. After
    a set time the process is to drain, for whoever starts it to see that it cannot go on.

    Args:
        clients: all that the process has; more may come.
        address: where they lead, and where user and password are read anew.
        drain_after_s: for how long it may be refused.
        readiness: of the process, which knows of refusals.

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
        """Until cancelled. Connections that fail are made anew by whoever has use for them; here those that do not."""
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
