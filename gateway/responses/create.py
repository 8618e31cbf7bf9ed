"""`POST /v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.admission.admission import Meter
from penstock.gateway.common.documents import Document, exactness
from penstock.gateway.context import Gateway, caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.generation.idempotency import key_of, other_body, place_asked_for
from penstock.gateway.generation.jobs import Job, job_of, named
from penstock.gateway.http.body import read_json
from penstock.gateway.http.events import BEFORE_ALL
from penstock.gateway.http.interruptions import interruption_of
from penstock.gateway.responses.documents import pending
from penstock.gateway.responses.events import ResponseEvents
from penstock.gateway.responses.input.item import InputItem
from penstock.gateway.responses.input.items import additional_tools, read_items, shown_items, to_messages
from penstock.gateway.responses.reading import Attended, followed, history_behind, snapshot
from penstock.gateway.responses.references import resolved
from penstock.gateway.responses.request import ResponseBody, read_response
from penstock.gateway.responses.stored import ResponseStore, StoredResponse, asked_for
from penstock.producer import GenerateRequest, PenstockError, QueueFull, ReplyGone, ServerRefused
from penstock.protocol.wire import MAX_KEEP_S

log = structlog.get_logger(__name__)


async def create_response(asked: Request) -> Response:
    gateway = gateway_of(asked)
    body = read_response(await read_json(asked, gateway.settings.max_body_bytes))
    body = body.model_copy(update={"input": await resolved(asked, body.input)})
    queue = await gateway.directory.queue_of(body.model, may_wait=body.background)
    response, request, meter = await _prepared(asked, queue, body)
    if body.store is not False:
        response, request = await _kept(asked, body, response, request)
    if body.background:
        return await _run_in_background(asked, response, request, meter, is_streamed=body.stream)
    job = job_of(asked, queue, request, meter)
    return _streamed(asked, response, job) if body.stream else await _whole(asked, response, job)


async def _prepared(asked: Request, queue: str, body: ResponseBody) -> tuple[StoredResponse, GenerateRequest, Meter]:
    """Returns the response as one that is not stored, its request to the queue, and the meter."""
    owner = caller_of(asked).owner
    body, items = with_input(body)
    history = await history_behind(asked, body.previous_response_id)
    card = await gateway_of(asked).directory.card_of(queue, may_wait=body.background)
    request, meter = await named(asked, queue, body.request([*history, *to_messages(items)], card))
    return unstored(body, request.id or "", queue, owner, items, history), request, meter


def unstored(
    body: ResponseBody,
    request_id: str,
    queue: str,
    owner: str,
    items: Sequence[InputItem],
    history: Sequence[Document] = (),
) -> StoredResponse:
    """Returns the response to a request, as long as nobody stores it."""
    return StoredResponse(
        request_id,
        queue,
        owner,
        created_at=None,
        asked=asked_for(body),
        has_logprobs=body.num_logprobs is not None,
        items=shown_items(items, request_id),
        history=history,
    )


def with_input(body: ResponseBody) -> tuple[ResponseBody, list[InputItem]]:
    """Returns a response's input items, and its body with the tools that they add.

    Raises:
        ApiError: they are invalid.
    """
    if body.input is None:
        if body.previous_response_id is None:
            raise ApiError(400, "input: is missing", param="input", code="missing_required_parameter")
        return body, []
    items = read_items(body.input)
    tools = [*body.tools, *additional_tools(items)]
    return body.model_copy(update={"tools": tools}), items


async def _kept(
    asked: Request, body: ResponseBody, response: StoredResponse, request: GenerateRequest
) -> tuple[StoredResponse, GenerateRequest]:
    """Stores the response. If too much is stored already, one whose storage was not requested is not stored."""
    gateway = gateway_of(asked)
    card = await gateway.directory.card_of(response.queue, may_wait=body.background)
    keep_s = min(gateway.settings.keep_responses_s, card.max_keep_s or MAX_KEEP_S)
    kept, request_to_keep = replace(response, asked={**response.asked, "store": True}), _keeping(request, keep_s)
    try:
        there = await ResponseStore(gateway.records).create(kept, request_to_keep)
    except ApiError as error:
        if error.code != "store_full" or body.store or body.background:
            raise
        return response, request
    if there.asked != kept.asked:
        raise other_body()  # the request to the queue is the same; how it is stored and shown is not
    return there, request_to_keep


def _keeping(request: GenerateRequest, keep_s: float) -> GenerateRequest:
    return request.model_copy(update={"keep_s": keep_s})


async def _run_in_background(
    asked: Request, response: StoredResponse, request: GenerateRequest, meter: Meter, *, is_streamed: bool
) -> Response:
    """Runs a response that continues without a client."""
    gateway, place = gateway_of(asked), place_asked_for(asked, key_of(asked))
    if place == BEFORE_ALL:
        await _submit(gateway, response, request, meter)
    if is_streamed:
        return followed(asked, response, place=place)
    is_new = key_of(asked) is None
    return JSONResponse(pending(response, "queued") if is_new else await snapshot(asked, response))


async def _submit(gateway: Gateway, response: StoredResponse, request: GenerateRequest, meter: Meter) -> None:
    try:
        await gateway.client.on(response.queue).submit(request)
    except (QueueFull, ReplyGone, ServerRefused) as error:
        meter.failed(error)
        await ResponseStore(gateway.records).delete(response)
        raise


def _streamed(asked: Request, response: StoredResponse, job: Job) -> Response:
    writer = ResponseEvents(response)
    stream = job.streamed(asked, writer, opening=writer.begin if response.record is not None else None)

    async def left() -> None:
        await _leave(asked, job, response, is_known=stream.has_begun)

    return Attended(stream, left)


async def _whole(asked: Request, response: StoredResponse, job: Job) -> Response:
    writer = ResponseEvents(response)
    try:
        reply = await job.whole(asked, each=writer.take)
        body = writer.body(reply)
    finally:
        await _leave(asked, job, response, is_known=writer.document is not None)
    return JSONResponse(body, headers=exactness(reply))


async def _leave(asked: Request, job: Job, response: StoredResponse, *, is_known: bool) -> None:
    """Leaves a request after its answer has ended here, or when nobody is there to get it.

    Under an Idempotency-Key others may wait for it. Otherwise it is ended, unless its client knows its id and this
    gateway had to leave it while the client may continue elsewhere.
    """
    gateway = gateway_of(asked)
    store = ResponseStore(gateway.records)
    interruption = interruption_of(asked).error
    is_shared, is_interrupted = key_of(asked) is not None, interruption is not None and interruption.may_be_retried
    try:
        if job.reply.reply is not None:
            await store.count(response, job.reply.reply)
        elif not (job.reply.has_ended or is_shared or (is_known and is_interrupted)):
            await gateway.client.handle(job.id, queue=job.queue).cancel()
        if not (is_known or is_shared):
            await store.delete(response)
    except PenstockError as error:
        if not gateway.standing.lost(error):
            log.warning("response_left", response_id=response.id, error=str(error))
