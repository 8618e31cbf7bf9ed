"""Decides which request that was present at several crashes runs alone next, and when."""

from __future__ import annotations

import asyncio
import time

from penstock.engine.driver import EngineDriver
from penstock.protocol.wire import GenerateRequest
from penstock.worker.intake.handing_back import HandingBack
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, Parked, RequestTable


class Suspects:
    """Queues suspects. A suspect waits until nothing else runs here, and for `wait_s` at most.

    Then running requests have to wait again, whatever their priority: once for each suspect. If a suspect comes back
    after that, nothing is taken until nothing runs. After each suspect it is the other requests' turn, unless another
    suspect's wait is over: that goes next. So no suspect waits longer than `wait_s` and the runs of those before it.

    Args:
        requests: this worker's.
        driver: the engine's, which must be idle for a suspect.
        handing_back: makes others wait again.
        wait_s: how long running requests go first.
    """

    def __init__(
        self, requests: RequestTable, driver: EngineDriver, handing_back: HandingBack, *, wait_s: float
    ) -> None:
        self._requests = requests
        self._driver = driver
        self._handing_back = handing_back
        self._wait_s = wait_s
        self._made_way_for: set[str] = set()  # entries of suspects

    def park(self, live: LiveRequest, entry: QueueEntry) -> None:
        """Makes a request wait until it can run alone."""
        asked = live.asked if isinstance(live.asked, GenerateRequest) else None
        suspect = Parked(
            live.queue,
            live.id,
            entry,
            priority=asked.priority if asked else 0,
            deadline_s=live.deadline_of(asked.timeout_s if asked else None),
            due_s=time.monotonic() + self._wait_s,
        )
        self._requests.park(suspect)
        asyncio.get_running_loop().call_later(self._wait_s + 0.001, self._requests.changed.fire)

    @property
    def next(self) -> Parked | None:
        """The suspect to run now: of the highest priority, and among equals the one that was parked first."""
        parked = self._requests.parked
        if not parked:
            return None
        moment_has_come = self._due or (list(parked.values()) if self.is_quiet else [])
        return max(moment_has_come, key=lambda each: each.priority, default=None)

    @property
    def is_due(self) -> bool:
        """Whether a suspect has waited for as long as others may go before it."""
        return bool(self._due)

    @property
    def _due(self) -> list[Parked]:
        now_s = time.monotonic()
        return [each for each in self._requests.parked.values() if now_s >= each.due_s]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs here, is about to, or has an unwritten end."""
        return not self._requests.is_busy and self._driver.is_idle

    async def make_way(self, suspect: Parked) -> None:
        """Makes running requests wait again, once for each suspect.

        Raises:
            RedisError: the server is in trouble; the requests are claimed again here.
        """
        entry_id = suspect.entry.id
        if not self.is_quiet and entry_id not in self._made_way_for:
            self._made_way_for.add(entry_id)
            await self._handing_back.make_way()

    def note_run(self, live: LiveRequest | None) -> None:
        """Notes that a suspect has run, or needed no run."""
        if live is not None and live.finish_reason is not None:
            self._made_way_for.discard(live.entry_id)
