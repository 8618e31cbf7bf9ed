"""Results of a batch's lines: kept once each, within the limit on the gateway's memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from penstock.gateway.batches.answering import LineOutcome
from penstock.gateway.batches.documents import unanswered
from penstock.gateway.batches.leases import BatchLease
from penstock.gateway.batches.lines import BatchLine
from penstock.gateway.batches.stopping import Stopped, retried
from penstock.gateway.batches.stored import BatchProgress, BatchStore, BodyName, StoredBatch
from penstock.gateway.context import Gateway
from penstock.gateway.errors import ApiError
from penstock.gateway.files.stored import KIND as FILE_KIND
from penstock.gateway.files.stored import FileStore, StoredFile
from penstock.gateway.store.ledger import Ledger
from penstock.gateway.store.records import name_of

log = structlog.get_logger(__name__)

LINE_BYTES = 64  # of a line in Redis, in addition to its own
STEP_BYTES = 64 << 10
FULL_WAIT_S = 5.0


class Allowance:
    """Memory of one file. It is charged somewhat ahead, so that few lines wait for it."""

    def __init__(self, ledger: Ledger, charged_to: str, ttl_s: int, num_bytes: int) -> None:
        self._ledger = ledger
        self._charged_to = charged_to
        self._ttl_s = ttl_s
        self._num_bytes = num_bytes
        self._num_charged = 0
        self._charging = asyncio.Lock()

    async def add(self, num_bytes: int) -> None:
        """Raises ApiError (507): the store is full; nothing changed."""
        async with self._charging:
            wanted = self._num_bytes + num_bytes
            if wanted > self._num_charged:
                await self._ledger.charge(self._charged_to, wanted + STEP_BYTES, self._ttl_s)
                self._num_charged = wanted + STEP_BYTES
            self._num_bytes = wanted


class Results:
    """Keeps results.

    Args:
        gateway: the process's.
        batches: the store of batches.
        batch: the batch.
        lease: the runner's.
        progress: the batch's, when the lease was taken.
        stopped: what ends it early.
    """

    def __init__(
        self,
        gateway: Gateway,
        batches: BatchStore,
        batch: StoredBatch,
        lease: BatchLease,
        progress: BatchProgress,
        stopped: Stopped,
    ) -> None:
        self._batches = batches
        self._batch = batch
        self._lease = lease
        self._stopped = stopped
        self._standing = gateway.standing
        sizes: dict[BodyName, int] = {
            "output": progress.number("output_bytes") + LINE_BYTES * progress.number("completed"),
            "errors": progress.number("error_bytes") + LINE_BYTES * progress.number("failed"),
        }
        self._allowances = {
            name: Allowance(gateway.ledger, name_of(FILE_KIND, batch.file_id(name)), batch.ttl_s, size)
            for name, size in sizes.items()
        }

    async def keep(self, line: BatchLine, outcome: LineOutcome) -> None:
        """Keeps a line's result. It waits while the store is full, until the batch stops.

        Raises:
            LeaseLost: another gateway runs the batch.
            ServerRefused: Redis refuses.
        """
        if not await self._has_room(outcome):
            message = "the answer is larger than what the gateway may keep"
            outcome = replace(
                outcome,
                data=unanswered(outcome.request_ids[0], line.custom_id, "store_full", message),
                is_good=False,
            )

        async def keep() -> None:
            lease, ttl_s = self._lease, self._batch.ttl_s
            await self._batches.keep(
                lease, line.place, outcome.data, ttl_s, is_good=outcome.is_good, counts=outcome.counts
            )

        await retried(keep, self._standing)

    async def _has_room(self, outcome: LineOutcome) -> bool:
        allowance = self._allowances["output" if outcome.is_good else "errors"]
        while True:
            try:
                await retried(lambda: allowance.add(len(outcome.data) + LINE_BYTES), self._standing)
            except ApiError as error:
                if error.code != "store_full":
                    raise
                log.warning("batch_waits_for_store", batch_id=self._batch.id, error=error.message)
            else:
                return True
            if self._stopped.code is not None:
                return False
            await self._stopped.wait(FULL_WAIT_S)


async def to_files(
    files: FileStore, batches: BatchStore, batch: StoredBatch, progress: BatchProgress
) -> dict[str, str]:
    """Makes files of a batch's results, and returns the batch's fields about them."""
    made: dict[str, str] = {}
    bodies: tuple[tuple[BodyName, str], ...] = (("output", "output"), ("errors", "error"))
    for name, kind in bodies:
        num_bytes = progress.number(f"{kind}_bytes")
        if num_bytes:
            await batches.expire_body(batch, name)
            file = StoredFile(
                id=batch.file_id(name),
                owner=batch.owner,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                num_bytes=num_bytes,
                ttl_s=batch.output_ttl_s,
                home=batch.id,
                body=name,
            )
            made[f"{kind}_file_id"] = (await files.create(file)).id
    return made
