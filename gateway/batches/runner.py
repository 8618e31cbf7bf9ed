"""Runs, in one gateway process, the batches that no other process runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import structlog

from penstock.gateway.batches.batch_run import BatchRun
from penstock.gateway.batches.leases import BatchLease, Leases
from penstock.gateway.batches.stopping import REDIS_DELAY_S
from penstock.gateway.batches.stored import LeaseLost
from penstock.gateway.context import Gateway
from penstock.gateway.http.unexpected import log_unexpected
from penstock.producer import PenstockError
from penstock.protocol.tasks import end_tasks

log = structlog.get_logger(__name__)

MAX_BATCHES = 64  # batches that one process runs at once
ROUNDS_A_LEASE = 3
RELEASE_TIMEOUT_S = 1.0
RETRY_S = 0.5
_PART = "batches"


class BatchRunner:
    """Use it with `async with`. At the end, its batches are free for others at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._leases = Leases(gateway.store, gateway.settings.batch_lease_s)
        self._round_s = gateway.settings.batch_lease_s / ROUNDS_A_LEASE
        self._running: dict[BatchRun, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="penstock-batches")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks([self._task])
        running, tasks = list(self._running), list(self._running.values())
        await end_tasks(tasks)
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await asyncio.gather(*(self._leases.release(run.lease, is_over=False) for run in running))

    async def _run(self) -> None:
        """Looks for batches at a fraction of the lease time, and whenever there is news."""
        news, is_well = self._gateway.has_batch_news, True
        while True:
            news.clear()
            try:
                await self._go_round()
                is_well = True
                self._gateway.standing.ready(_PART)
            except Exception as error:  # whatever it is, all batches depend on this task
                if not self._gateway.standing.lost(error, _PART) and is_well:  # once, until it is well again
                    log.warning("batches_unknown", error=str(error), exc_info=not isinstance(error, PenstockError))
                is_well = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._round_s if is_well else min(RETRY_S, self._round_s)):
                    await news.wait()

    async def _go_round(self) -> None:
        await asyncio.gather(*map(self._renew, list(self._running)))
        num_free = MAX_BATCHES - len(self._running)
        if num_free > 0:
            for lease in await self._leases.claim(num_free):
                self._start(lease)

    async def _renew(self, run: BatchRun) -> None:
        if await self._leases.renew(run.lease):
            await run.look()
        elif task := self._running.get(run):
            log.warning("batch_lost", batch_id=run.lease.batch_id)
            task.cancel()

    def _start(self, lease: BatchLease) -> None:
        run = BatchRun(self._gateway, lease)
        task = asyncio.create_task(self._go_on(run))
        self._running[run] = task
        task.add_done_callback(lambda _: self._running.pop(run, None))

    async def _go_on(self, run: BatchRun) -> None:
        """Runs a batch. If that fails, its lease lapses and another gateway tries again; if Redis fails, this one soon
        retries.
        """
        batch_id, is_over = run.lease.batch_id, False
        try:
            while not is_over:
                is_over = await self._try(run)
        except* LeaseLost:
            log.warning("batch_lost", batch_id=batch_id)
        except* PenstockError as group:
            log.warning("batch_stumbled", batch_id=batch_id, error=str(_first(group)))
        except* Exception as group:
            log_unexpected("batch_failed", _first(group), batch_id=batch_id)

    async def _try(self, run: BatchRun) -> bool:
        """Runs a batch once. Returns whether it is over; else Redis was lost, and it continues from its kept
        results.
        """
        try:
            await run.run()
            await self._leases.release(run.lease, is_over=True)
        except* PenstockError as group:
            if not all(self._gateway.standing.lost(error) for error in _leaves(group)):
                raise
        else:
            return True
        await asyncio.sleep(random.uniform(0.5, 1.0) * REDIS_DELAY_S)
        return False


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            assert isinstance(error, Exception)  # noqa: S101  as the group that was caught
            yield error


def _first(group: BaseExceptionGroup[Any]) -> Exception:
    return next(_leaves(group))
