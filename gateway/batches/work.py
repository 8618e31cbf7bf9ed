"""Turns a line's body into requests to the queue, and their replies into its answer, both as the routes do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.admission.tenancy import tenancy
from penstock.gateway.batches.lines import BatchLine
from penstock.gateway.common.documents import Document
from penstock.gateway.common.options import RequestOptions
from penstock.gateway.errors import ApiError
from penstock.gateway.openai.chat import chat_completion
from penstock.gateway.openai.chat_request import read_chat
from penstock.gateway.openai.completion_request import read_completion
from penstock.gateway.openai.completions import check_number, completion, parts_of
from penstock.gateway.openai.tokens import tokens_of
from penstock.gateway.responses.create import unstored, with_input
from penstock.gateway.responses.events import ResponseEvents
from penstock.gateway.responses.input.items import to_messages
from penstock.gateway.responses.request import read_response
from penstock.producer import AsyncClient, Chunk, GenerateRequest, ModelCard, Reply
from penstock.protocol.ranks import LOWEST_PRIORITY
from penstock.protocol.wire import MAX_KEEP_S

KEEP_S = 86_400
"""How long a line's reply is kept for a takeover, as far as workers allow; a kept result ends that."""


@dataclass(frozen=True, slots=True)
class LineTarget:
    """Target of a line's requests."""

    client: AsyncClient  # of the line's queue
    queue: str
    card: ModelCard
    owner: str
    tenant: str | None
    isolates_prefix_cache: bool
    timeout_s: float
    max_prompts: int


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Work of a line.

    Attributes:
        requests: to the queue.
        body: makes the answer's body from the replies to all of them.
        each: gets each of the reply's chunks once, if there is one request.
    """

    requests: Sequence[GenerateRequest]
    body: Callable[[Sequence[Reply]], Document]
    each: Callable[[Chunk], object] | None = None


async def work_of(endpoint: str, line: BatchLine, place: LineTarget, id_of: Callable[[int], str]) -> BatchWork:
    """Returns the work that a line asks for.

    Args:
        endpoint: the batch's.
        line: the line.
        place: the target of its requests.
        id_of: returns the id of its nth request.

    Raises:
        ApiError: naming the field that is wrong.
        CallTimedOut, ConnectionLost, ...: no worker answered a question that only a worker can.
    """
    work = await _READERS[endpoint](line.body, place, id_of)
    keep_s = min(KEEP_S, place.card.max_keep_s or MAX_KEEP_S)
    requests = [
        request.model_copy(
            update={
                "id": id_of(number),
                "priority": LOWEST_PRIORITY,
                "timeout_s": min(place.timeout_s, request.timeout_s or place.timeout_s),
                "keep_s": keep_s,
                **tenancy(request, place.tenant, isolates=place.isolates_prefix_cache),
            }
        )
        for number, request in enumerate(work.requests)
    ]
    return BatchWork(requests, work.body, work.each)


async def _chat(body: Mapping[str, Any], place: LineTarget, _: Callable[[int], str]) -> BatchWork:
    chat = read_chat(body)
    _check_whole(chat)
    request = chat.request(place.card)
    shown = chat.shown(await tokens_of(place.client, request) if chat.return_token_ids else None)
    return BatchWork([request], lambda replies: chat_completion(replies[0], chat.model, shown))


async def _completion(body: Mapping[str, Any], place: LineTarget, _: Callable[[int], str]) -> BatchWork:
    asked = read_completion(body)
    _check_whole(asked)
    check_number(len(asked.prompts), place.max_prompts)
    requests = asked.requests()
    parts = await parts_of(place.client, asked, requests)
    return BatchWork(requests, lambda replies: completion(replies, asked.model, parts))


async def _response(body: Mapping[str, Any], place: LineTarget, id_of: Callable[[int], str]) -> BatchWork:
    """Returns a response's work. The response is not stored: the output file has it."""
    asked = read_response(body)
    _check_whole(asked)
    for name in ("background", "previous_response_id"):
        if getattr(asked, name):
            raise _refused(name, "a batch is in the background, and its lines do not follow each other")
    asked, items = with_input(asked)
    writer = ResponseEvents(unstored(asked, id_of(0), place.queue, place.owner, items))
    request = asked.request(to_messages(items), place.card)
    return BatchWork([request], lambda replies: writer.body(replies[0]), writer.take)


_READERS: Mapping[str, Callable[[Mapping[str, Any], LineTarget, Callable[[int], str]], Awaitable[BatchWork]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
}


def _check_whole(options: RequestOptions) -> None:
    if options.stream:
        raise _refused("stream", "nobody reads the answers of a batch while they are written")


def _refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
