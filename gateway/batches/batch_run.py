"""Runs one batch under a lease, from validation to its output files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

import structlog

from penstock.gateway.batches.answering import Answering
from penstock.gateway.batches.documents import error_of, errors_document
from penstock.gateway.batches.leases import BatchLease
from penstock.gateway.batches.lines import RawLine, raw_lines
from penstock.gateway.batches.results import Results, to_files
from penstock.gateway.batches.stopping import Stopped, retried
from penstock.gateway.batches.stored import BatchProgress, BatchStatus, BatchStore, StoredBatch
from penstock.gateway.batches.validation import validate
from penstock.gateway.context import Gateway
from penstock.gateway.errors import ApiError
from penstock.gateway.files.bodies import BodyLost
from penstock.gateway.files.stored import FileStore
from penstock.gateway.keys.cache import expired, revoked
from penstock.gateway.keys.records import ApiKey
from penstock.gateway.keys.store import KeyStore
from penstock.protocol.tasks import end_tasks

log = structlog.get_logger(__name__)


class BatchRun:
    """Runs one batch to its end, or until this run is cancelled: another gateway then continues."""

    def __init__(self, gateway: Gateway, lease: BatchLease) -> None:
        self.lease = lease
        self._gateway = gateway
        self._batches = BatchStore(gateway.store, gateway.records)
        self._files = FileStore(gateway.store, gateway.records)
        self._stopped = Stopped()

    async def look(self) -> None:
        """Checks whether somebody has cancelled the batch."""
        if (await self._batches.progress(self.lease.batch_id)).status == "cancelling":
            self._stopped.stop("batch_cancelled", "the batch was cancelled before the request was answered")

    async def run(self) -> None:
        """Runs the batch.

        Raises:
            LeaseLost: another gateway runs it.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        batch = await self._batches.find(self.lease.batch_id)
        if batch is None:  # it has expired, with all its data
            return
        async with self._watched(batch) as key:
            await self._go_on(batch, key)

    async def _go_on(self, batch: StoredBatch, key: ApiKey | None) -> None:
        progress = await self._batches.progress(batch.id)
        status = progress.status
        if status == "validating":
            status = await self._validate(batch, key)
            progress = await self._batches.progress(batch.id)
        if status in ("in_progress", "cancelling"):
            status = await self._answer(batch, key, progress)
        if status in ("finalizing", "cancelling"):
            await self._finish(batch, status)
        await self._files.leave(batch.input_file_id, batch.id)

    @asynccontextmanager
    async def _watched(self, batch: StoredBatch) -> AsyncIterator[ApiKey | None]:
        """Yields the owner's API key. The batch stops if that is revoked, or when its own time is over."""
        now_ms, key, key_ms = await self._owner(batch)
        loop = asyncio.get_running_loop()
        left_s = max(0.0, batch.expires_at - now_ms / 1000)
        self._deadline_s = loop.time() + left_s
        expiry = "the batch's completion_window was over before the request was answered"
        timers = [loop.call_later(left_s, self._stopped.stop, "batch_expired", expiry)]
        if key_ms is not None and key_ms / 1000 < left_s:
            timers.append(loop.call_later(key_ms / 1000, self._stopped.stop_with, expired(batch.owner)))
        with self._gateway.interruptions.opened(batch.owner or None) as interruption:
            hearing = asyncio.create_task(self._hear(interruption.wait()))
            try:
                yield key
            finally:
                await end_tasks([hearing])
                for timer in timers:
                    timer.cancel()

    async def _owner(self, batch: StoredBatch) -> tuple[int, ApiKey | None, int | None]:
        """Returns the server's clock, the key, and for how long it is valid."""
        found = await KeyStore(self._gateway.store.execute).find(batch.owner)
        if batch.owner and found.state != "active":
            self._stopped.stop_with(expired(batch.owner) if found.state == "expired" else revoked(batch.owner))
        return found.now_ms, found.key, found.left_ms

    async def _hear(self, interruption: Coroutine[Any, Any, ApiError]) -> None:
        """Stops the batch if its key is revoked. A gateway that shuts down leaves the batch to another."""
        error = await interruption
        if error.status == 401:
            self._stopped.stop_with(error)

    async def _validate(self, batch: StoredBatch, key: ApiKey | None) -> str:
        directory = self._gateway.directory.limited_to(None if key is None else key.models)
        max_bytes = self._gateway.settings.max_body_bytes

        async def find() -> Any:
            lines = self._lines(batch)
            return await validate(lines, endpoint=batch.endpoint, max_line_bytes=max_bytes, directory=directory)

        try:
            findings = await self._stopped.unless(retried(find, self._gateway.standing))
        except (ApiError, BodyLost) as error:
            problem = error if isinstance(error, ApiError) else _input_lost(batch)
            return await self._advance("validating", "failed", errors=errors_document([error_of(problem)]))
        if findings is None:
            return await self._stop("validating")
        if findings.errors:
            return await self._advance("validating", "failed", errors=errors_document(findings.errors))
        fields: dict[str, Any] = {"total": findings.num_lines, "queues": json.dumps(findings.queues)}
        if findings.model is not None:
            fields["model"] = findings.model
        return await self._advance("validating", "in_progress", **fields)

    async def _answer(self, batch: StoredBatch, key: ApiKey | None, progress: BatchProgress) -> str:
        """Answers the lines without a result, several at a time; once the batch stops, no more are begun."""
        if progress.status == "cancelling":
            await self.look()
        queues = progress.document("queues")
        if queues is not None:
            results = Results(self._gateway, self._batches, batch, self.lease, progress, self._stopped)
            answering = Answering(self._gateway, batch, key, queues, self._deadline_s, self._stopped)
            try:
                await self._answer_lines(batch, answering, results)
            except* BodyLost:
                self._stopped.stop_with(_input_lost(batch))
        if self._stopped.code is None:
            return await self._advance("in_progress", "finalizing", outcome="completed")
        return await self._stop("in_progress")

    async def _answer_lines(self, batch: StoredBatch, answering: Answering, results: Results) -> None:
        done = await self._batches.places(batch.id)
        slots = asyncio.Semaphore(self._gateway.settings.max_batch_lines)
        max_bytes = self._gateway.settings.max_body_bytes

        async def answer(raw: RawLine) -> None:
            try:
                try:
                    line = await raw.parsed(batch.endpoint, max_bytes)
                except ApiError as error:  # the batch was validated: somebody has changed its input since
                    raise BodyLost(batch.input_file_id) from error
                outcome = await answering.outcome(line)
                await results.keep(line, outcome)
                await answering.forget(outcome)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            async for raw in self._lines(batch):
                if raw.place not in done:
                    await slots.acquire()
                    tasks.create_task(answer(raw))

    async def _stop(self, status: Literal["validating", "in_progress"]) -> str:
        """Returns the status that follows `status` for a batch that has stopped, for whatever reason."""
        if self._stopped.code == "batch_expired":
            return await self._advance(status, "finalizing", outcome="expired")
        errors = [] if self._stopped.error is None else [error_of(self._stopped.error)]
        fields = {"errors": errors_document(errors)} if errors else {}
        return await self._advance(status, "cancelling", **fields)

    async def _finish(self, batch: StoredBatch, status: str) -> None:
        """Makes files of the results."""
        progress = await self._batches.progress(batch.id)
        made = await to_files(self._files, self._batches, batch, progress)
        outcome: Any = "cancelled" if status == "cancelling" else progress.fields["outcome"]
        before: Any = status
        await self._advance(before, outcome, **made)

    async def _advance(self, status: BatchStatus, to: BatchStatus, **fields: str | int) -> str:
        now = await self._batches.advance(self.lease, status, to, **fields)
        log.info("batch_status", batch_id=self.lease.batch_id, status=now)
        return now

    def _lines(self, batch: StoredBatch) -> AsyncIterator[RawLine]:
        return raw_lines(self._input(batch), self._gateway.settings.max_body_bytes)

    async def _input(self, batch: StoredBatch) -> AsyncIterator[bytes]:
        file = await self._files.find(batch.input_file_id)
        if file is None:
            raise BodyLost(batch.input_file_id)
        async for piece in self._files.pieces(file):
            yield piece


def _input_lost(batch: StoredBatch) -> ApiError:
    message = f"the input file {batch.input_file_id} is not there any more"
    return ApiError(404, message, param="input_file_id", code="file_lost")
