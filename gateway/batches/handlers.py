"""`/v1/batches`: https://platform.openai.com/docs/api-reference/batch."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.admission.request_ids import request_id_of
from penstock.gateway.batches.documents import batch_document
from penstock.gateway.batches.leases import Leases
from penstock.gateway.batches.request import BatchBody, read_batch
from penstock.gateway.batches.stored import ENDED, PREFIX, BatchStore, StoredBatch, restored
from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.files.stored import FileStore, StoredFile
from penstock.gateway.generation.idempotency import key_of
from penstock.gateway.http.body import read_json
from penstock.gateway.http.paging import limit_of, page, start_of

MAX_LISTED = 100


async def create_batch(asked: Request) -> Response:
    """Creates a batch. A repetition with the same Idempotency-Key returns the same batch."""
    gateway = gateway_of(asked)
    body = read_batch(await read_json(asked, gateway.settings.max_body_bytes))
    files = FileStore(gateway.store, gateway.records)
    file = await files.read(body.input_file_id, caller_of(asked), param="input_file_id")
    batches = _batches(asked)
    batch = await batches.create(await _described(asked, body, file))
    if (await batches.progress(batch.id)).status not in ENDED:
        await files.use(file.id, batch.id, batch.window_s)
        await Leases(gateway.store, gateway.settings.batch_lease_s).offer(batch.id)
    await batches.listing.add(batch.owner, batch.id)
    gateway.has_batch_news.set()
    return await _shown(asked, batch)


async def list_batches(asked: Request) -> Response:
    batches, owner = _batches(asked), caller_of(asked).owner
    limit = limit_of(asked, default=20, largest=MAX_LISTED)
    ids = (await batches.listing.ids(owner))[::-1]
    ids = ids[start_of(asked, ids) :]
    found = [batch for each in await batches.listing.read(owner, ids[:limit]) if (batch := restored(each)) is not None]
    documents = [batch_document(batch, await batches.progress(batch.id)) for batch in found]
    return JSONResponse(page(documents, has_more=len(ids) > limit))


async def retrieve_batch(asked: Request) -> Response:
    """Returns a batch. If it has not ended, it is offered to the runners, in case the list of batches was lost."""
    batch, gateway = await _asked_for(asked), gateway_of(asked)
    progress = await _batches(asked).progress(batch.id)
    if progress.status not in ENDED:
        await Leases(gateway.store, gateway.settings.batch_lease_s).offer(batch.id)
    return JSONResponse(batch_document(batch, progress))


async def cancel_batch(asked: Request) -> Response:
    """Cancels a batch. The gateway that runs it cancels its requests."""
    batch = await _asked_for(asked)
    status = await _batches(asked).cancel(batch.id)
    if status not in ("cancelling", "cancelled", "finalizing"):
        message = f"batch {batch.id} is {status}, it can't be cancelled any more"
        raise ApiError(409, message, type="conflict_error", code="batch_ended")
    gateway_of(asked).has_batch_news.set()
    return await _shown(asked, batch)


def _batches(asked: Request) -> BatchStore:
    gateway = gateway_of(asked)
    return BatchStore(gateway.store, gateway.records)


async def _asked_for(asked: Request) -> StoredBatch:
    return await _batches(asked).read(asked.path_params["batch_id"], caller_of(asked))


async def _shown(asked: Request, batch: StoredBatch) -> Response:
    return JSONResponse(batch_document(batch, await _batches(asked).progress(batch.id)))


async def _described(asked: Request, body: BatchBody, file: StoredFile) -> StoredBatch:
    """Describes the batch. It ends with its input at the latest."""
    gateway, key = gateway_of(asked), key_of(asked)
    made = secrets.token_hex(16) if key is None else request_id_of(asked, key, 0, is_cluster=False)
    kept_s, expires = gateway.settings.keep_files_s, body.output_expires_after
    return StoredBatch(
        id=PREFIX + made,
        owner=caller_of(asked).owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        window_s=max(1, min(body.window_s, file.expires_at - await gateway.ledger.now_s())),
        metadata=body.metadata,
        output_ttl_s=kept_s if expires is None else expires.seconds,
    )
