"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from penstock.gateway.http.interruptions import Interruption, interruption_of
from penstock.protocol.tasks import end_tasks

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


async def while_asked(asked: Request, work: Coroutine[Any, Any, T]) -> T:
    """Calls `while_wanted` for an answer that `work` returns as a whole."""
    return await while_wanted(asked.receive, work, interruption_of(asked))


async def while_wanted(receive: Receive, work: Coroutine[Any, Any, T], interruption: Interruption | None = None) -> T:
    """Awaits `work`, which is cancelled when the client leaves or the answer is interrupted.

    Nothing else may listen: a server reports that the client has left only to a reader of the request.

    Raises:
        ClientGone: it left.
        ApiError: the interruption came.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(_wait_until_gone(receive))]
    if interruption is not None:
        watching.append(asyncio.ensure_future(_wait_until_interrupted(interruption)))
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            if task.done() and not working.done():
                task.result()
        return working.result()
    finally:
        await end_tasks([working, *watching])


async def _wait_until_gone(receive: Receive) -> NoReturn:
    """Waits for the client to leave. What it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


async def _wait_until_interrupted(interruption: Interruption) -> NoReturn:
    raise await interruption.wait()
