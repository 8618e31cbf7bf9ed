"""Routes of a stored response: the response, its events, its input, and its cancellation."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.paging import is_ascending, limit_of, number_of, page, start_of
from penstock.gateway.http.resuming import sent_place
from penstock.gateway.responses.reading import handle_of, resumed, snapshot, state_of
from penstock.gateway.responses.stored import ResponseStore, StoredResponse
from penstock.producer import ReplyTimeout, RequestFailed, RequestRefused
from penstock.protocol import keys
from penstock.protocol.wire import MIN_KEEP_S

CANCEL_WAIT_S = 5.0
"""A worker sees a cancellation within a fraction of this; without a worker, the request still waits."""

MAX_LISTED = 100


async def retrieve_response(asked: Request) -> Response:
    response = await _stored(asked)
    if _flag(asked, "stream"):
        after = number_of(asked, "starting_after", default=-1, smallest=0, largest=2**53)
        await state_of(asked, response)
        return await resumed(asked, response, after=after, place=sent_place(asked))
    return JSONResponse(await snapshot(asked, response))


async def cancel_response(asked: Request) -> Response:
    """Cancels a response, and returns it as it ended; if no worker reacts in time, it still waits."""
    response = await _stored(asked)
    await _end(asked, response)
    return JSONResponse(await snapshot(asked, response))


async def delete_response(asked: Request) -> Response:
    """Deletes a response at once. A takeover may still need the end of its reply, which is therefore deleted a little
    later.
    """
    response = await _stored(asked)
    gateway = gateway_of(asked)
    with suppress(ApiError):  # its reply has expired
        await _end(asked, response)
    await gateway.store.execute("EXPIRE", keys.reply(response.queue, response.request_id), MIN_KEEP_S)
    await ResponseStore(gateway.records).delete(response)
    return JSONResponse({"id": response.id, "object": "response", "deleted": True})


async def list_input_items(asked: Request) -> Response:
    response = await _stored(asked)
    items = list(response.items) if is_ascending(asked) else list(response.items)[::-1]
    limit = limit_of(asked, default=20, largest=MAX_LISTED)
    first = start_of(asked, [item["id"] for item in items], "item ")
    shown = items[first : first + limit]
    return JSONResponse(page(shown, has_more=first + limit < len(items), nothing=""))


async def _stored(asked: Request) -> StoredResponse:
    store = ResponseStore(gateway_of(asked).records)
    return await store.read(asked.path_params["response_id"], caller_of(asked))


async def _end(asked: Request, response: StoredResponse) -> None:
    if await state_of(asked, response) == "finished":
        return
    handle = handle_of(asked, response)
    await handle.cancel()
    with suppress(ReplyTimeout, RequestFailed, RequestRefused):
        await handle.result(timeout=CANCEL_WAIT_S)


def _flag(asked: Request, name: str) -> bool:
    value = asked.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError(400, f"{name}: is true or false, not {value[:80]!r}", param=name, code="invalid_value")
    return value in ("true", "1")
