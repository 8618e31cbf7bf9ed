"""Checks whether any worker serves the queue of a load, and which model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypeVar

from penstock.producer import AsyncClient, ConnectionLost
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import ModelCard
from penstock.tools.bench.errors import NotServed, WrongModel

LOOK_INTERVAL_S = 1.0  # Redis notifies nobody when a key lapses

T = TypeVar("T")


async def require_served(client: AsyncClient, queue: str) -> None:
    """Checks once, without waiting, that a worker serves `queue`.

    Raises:
        NotServed: no worker serves `queue`, which is the client's. ConnectionLost, ServerRefused: Redis can't be
            reached, or refuses.
    """
    if not (await client.queue_status()).is_served:
        raise NotServed(queue, await client.queues())


async def served_model(client: AsyncClient, queue: str, wanted: str | None = None) -> ModelCard | None:
    """Returns the model card that the workers of `queue` published; None: there is none.

    Args:
        client: this queue's.
        queue: the name.
        wanted: what they must serve: the model's name as configured, its last part, or the digest of the weights or of
            the whole model (`ModelCard`).

    Raises:
        WrongModel: they do not serve `wanted`. ConnectionLost, ServerRefused: Redis can't be reached, or refuses.
    """
    card = await client.model_card()
    if wanted is not None and wanted not in _names(card):
        raise WrongModel(queue, wanted, None if card is None else card.model)
    return card


async def while_served(client: AsyncClient, queue: str, work: Coroutine[Any, Any, T]) -> T:
    """Returns the outcome of `work`, and cancels it once nobody serves `queue`, as its replies would never come.

    Raises:
        NotServed: the last worker is gone; a dead one is gone once its heartbeat has lapsed.
        ServerRefused: Redis refuses. `work` has to bear a lost connection itself. Whatever `work` raises.
    """
    working = asyncio.create_task(work, name="bench")
    watching = asyncio.create_task(_wait_until_unserved(client), name="bench-watch")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise NotServed(queue, await client.queues(), any_more=True)
    finally:
        await end_tasks([working, watching])


async def _wait_until_unserved(client: AsyncClient) -> None:
    is_served = True
    while is_served:
        await asyncio.sleep(LOOK_INTERVAL_S)
        with suppress(ConnectionLost):
            is_served = (await client.queue_status()).is_served


def _names(card: ModelCard | None) -> set[str | None]:
    if card is None:
        return set()
    return {*card.names, PurePath(card.model).name, card.weights, card.digest}
