"""Work for a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.producer.tasks import end_tasks

T = TypeVar("T")


class ClientGone(Exception):
    """Whoever asked has closed the connection: there is nobody to answer."""


async def until_gone(receive: Receive) -> None:
    """Ends once the client is gone. What it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which is cancelled when the client goes.

    Nobody else listens: a server says that the client has gone to whoever asks for more of the request.

    Raises:
        ClientGone: it went.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await end_tasks([working, gone])
