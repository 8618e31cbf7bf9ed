"""Resumes an answer that a client has seen part of. Nothing is generated again."""

from __future__ import annotations

from penstock.gateway.context import Gateway
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import Place, entry_of
from penstock.gateway.http.resuming import NO_ENTRY, PLACE_HEADER, Entry, check_written
from penstock.protocol import keys


async def check_can_go_on(gateway: Gateway, queue: str, request_id: str, place: Place) -> None:
    """Passes if a request was sent, and its answer reaches as far as `place`.

    Raises:
        ApiError: nobody has sent it, or it has no such event so far (400).
        ReplyGone: it ended and expired.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    if await gateway.client.handle(request_id, queue=queue).state() == "unknown":
        message = f"{PLACE_HEADER}: there is no answer to go on with; without this header the request begins a new one"
        raise ApiError(400, message, param=PLACE_HEADER, code="invalid_event_id")
    check_written(place, await newest_entry(gateway, queue, request_id))


async def newest_entry(gateway: Gateway, queue: str, request_id: str) -> Entry:
    """Returns the last entry that the answer has by now."""
    key = keys.reply(queue, request_id)
    entries = await gateway.store.execute("XREVRANGE", key, "+", "-", "COUNT", 1)
    return entry_of(entries[0][0].decode()) if entries else NO_ENTRY
