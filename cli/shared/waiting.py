"""Shows the state of a queue while a command waits for its requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from penstock.local.progress import spinner
from penstock.producer import AsyncClient, PenstockError, Prefill, QueueStatus, ReplyStream
from penstock.protocol.tasks import end_tasks

PATIENCE_S = 0.3  # most answers begin sooner
LOOK_INTERVAL_S = 1.0  # Redis notifies nobody that a key came or that a stream became shorter


@asynccontextmanager
async def shown_wait(
    client: AsyncClient, queue: str, reply: ReplyStream
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Shows the queue's state, or how far the prompt is, on a terminal until the block ends or the yielded function
    is awaited.

    The client itself logs at once if no worker serves the queue.
    """
    tasks = [asyncio.create_task(_show_wait(client, queue, reply))] if sys.stderr.isatty() else []
    try:
        yield lambda: end_tasks(tasks)
    finally:
        await end_tasks(tasks)


async def wait_until_served(client: AsyncClient, queue: str) -> None:
    """Waits until a worker serves the queue, and says so if it has to wait.

    Raises:
        ConnectionLost, ServerRefused: Redis can't be reached, or refuses.
    """
    now = await client.queue_status()
    if now.is_served:
        return
    structlog.get_logger().warning(f"no worker serves queue {queue!r}; waiting for one")
    with spinner(_sentence(queue, now)) as say:
        while not now.is_served:
            say(_sentence(queue, now))
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = await client.queue_status()


async def _show_wait(client: AsyncClient, queue: str, reply: ReplyStream) -> None:
    await asyncio.sleep(PATIENCE_S)
    with spinner("waiting for the first token") as say:
        reply.on_prefill(lambda prefill: say(prefill_sentence(prefill)))
        while True:
            try:
                if reply.prefill is None:
                    say(_sentence(queue, await client.queue_status()))
            except PenstockError as error:  # the reader of the reply gets the error in the end
                say(str(error))
            await asyncio.sleep(LOOK_INTERVAL_S)


def prefill_sentence(prefill: Prefill) -> str:
    return f"reading the prompt: {prefill.done:,} of {prefill.total:,} tokens"


def _sentence(queue: str, now: QueueStatus) -> str:
    if now.is_served:
        return f"waiting for the first token; requests in queue {queue!r}: {now.num_requests}"
    return f"no worker serves queue {queue!r}; backlog: {now.num_requests}"
