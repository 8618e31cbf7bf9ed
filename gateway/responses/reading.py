"""Reads the answer of a stored response from its reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.common.documents import Document
from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError, api_error
from penstock.gateway.generation.jobs import read_whole
from penstock.gateway.generation.resuming import newest_entry
from penstock.gateway.http.events import BEFORE_ALL, Place
from penstock.gateway.http.interruptions import interruption_of
from penstock.gateway.http.passed_over import reading_fields
from penstock.gateway.http.resuming import AFTER_ALL, Entry, SoughtNumber, check_written
from penstock.gateway.http.streaming import EventStream
from penstock.gateway.responses.documents import pending
from penstock.gateway.responses.events import ResponseEvents
from penstock.gateway.responses.input.items import read_items, to_messages
from penstock.gateway.responses.stored import ResponseStore, StoredResponse, not_found
from penstock.producer import Handle, PenstockError, ReplyGone, ReplyStream, RequestFailed, RequestRefused, State

log = structlog.get_logger(__name__)

_PREVIOUS = "previous_response_id"


class Attended(Response):
    """An answer with work to do after it, however it ended, unless the process ends during it."""

    def __init__(self, answer: Response, done: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except Exception:
            await self._done()
            raise
        await self._done()


async def resumed(asked: Request, response: StoredResponse, *, after: int, place: Place) -> Response:
    """Streams the response's events after number `after`, and after `place`.

    Raises:
        ApiError: there are no such events so far (400), if that is known before reading them.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    newest = await newest_entry(gateway_of(asked), response.queue, response.request_id)
    check_written(place, newest)
    return followed(asked, response, after=after, place=place, newest=newest)


def followed(
    asked: Request,
    response: StoredResponse,
    *,
    after: int = -1,
    place: Place = BEFORE_ALL,
    newest: Entry = AFTER_ALL,
) -> Response:
    """Streams the response's events. It continues without readers if it runs in the background."""
    gateway = gateway_of(asked)
    reply = handle_of(asked, response).stream()
    writer = ResponseEvents(response, after=after)
    sought = SoughtNumber(after, "starting_after", lambda: writer.num_given, newest)
    stream = EventStream(
        reply,
        writer,
        reading=nullcontext() if response.is_background else gateway.watch.reading(response.queue, reply),
        interruption=interruption_of(asked),
        told=gateway.standing.told,
        commit_after_s=gateway.settings.commit_after_s,
        ping_interval_s=gateway.settings.ping_interval_s,
        after=place,
        sought=[] if after < 0 else [sought],
        opening=writer.begin,
        is_sure=True,
    )
    return Attended(stream, lambda: _count(asked, response, reply))


async def snapshot(asked: Request, response: StoredResponse) -> Document:
    """Returns the response as it is now.

    Raises:
        ApiError: its reply has expired (404).
    """
    state = await state_of(asked, response)
    if state != "finished":
        return pending(response, "queued" if state == "queued" else "in_progress")
    writer = ResponseEvents(response)
    reply = handle_of(asked, response).stream()
    try:
        body = writer.body(await read_whole(reply, writer.take))
    except (RequestFailed, RequestRefused) as error:
        body = writer.body(api_error(error))
    except ApiError as error:  # it expired, which a body can express
        body = writer.body(error)
    await _count(asked, response, reply)
    return body


async def state_of(asked: Request, response: StoredResponse, *, param: str | None = None) -> State:
    """Returns the request's state. Raises ApiError (404): it was never sent, or its reply has expired."""
    try:
        state = await handle_of(asked, response).state()
    except ReplyGone:
        raise not_found(response.id, param=param) from None
    if state == "unknown":
        raise not_found(response.id, param=param)
    return state


def handle_of(asked: Request, response: StoredResponse) -> Handle:
    return gateway_of(asked).client.handle(response.request_id, queue=response.queue)


async def history_behind(asked: Request, response_id: str | None) -> list[Document]:
    """Returns the messages of a conversation up to a response's answer; none without a response.

    Raises:
        ApiError: it does not exist (404), or has no answer to continue from (400).
    """
    if response_id is None:
        return []
    response = await ResponseStore(gateway_of(asked).records).read(response_id, caller_of(asked), param=_PREVIOUS)
    if await state_of(asked, response, param=_PREVIOUS) != "finished":
        message = f"{_PREVIOUS}: response {response_id!r} has not ended"
        raise ApiError(400, message, param=_PREVIOUS, code="response_not_ended")
    try:
        reply = await handle_of(asked, response).result()
    except (RequestFailed, RequestRefused) as error:
        message = f"{_PREVIOUS}: response {response_id!r} failed, {error.code}"
        raise ApiError(400, message, param=_PREVIOUS, code="response_failed") from None
    except ReplyGone:
        raise not_found(response_id, param=_PREVIOUS) from None
    with reading_fields(is_strict=False):  # what was passed over was said when it came
        items = read_items(list(response.items))
    return [*response.history, *to_messages(items), reply.message]


async def _count(asked: Request, response: StoredResponse, reply: ReplyStream) -> None:
    """Counts the reply's size. Failing is harmless: the next reader of the end counts it."""
    if reply.reply is None:
        return
    gateway = gateway_of(asked)
    try:
        await ResponseStore(gateway.records).count(response, reply.reply)
    except PenstockError as error:
        if not gateway.standing.lost(error):
            log.warning("response_not_counted", response_id=response.id, error=str(error))
