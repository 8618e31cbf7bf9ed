"""`penstock workers`: who serves a queue. Needs the light client only."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected
from penstock.cli.watching.view import reasons, workers_table
from penstock.local.console import console
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.snapshot import Snapshot, worker_document
from penstock.protocol.queue.load import QueueLoad
from penstock.worker.settings import Settings


@takes_settings(["redis_url", "queue"])
def workers(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per worker.")] = False,
) -> None:
    """List the workers of a queue, and its backlog.

    `requests` counts what a worker has taken and not finished; the backlog counts what no worker has. `slots` shows how
    many sequences it runs, how many it could, and how many wait for a slot or for pages; `pages` shows how much of the
    KV cache requests hold. A worker is silent if it has not reported for a second (it reports twice as often), and lost
    once its heartbeat has lapsed: the others take over its requests within seconds. Workers with different digests
    after the model's name do not continue each other's replies.
    """
    found = asyncio.run(_look(settings))
    if as_json:
        for worker in found.workers:
            typer.echo(json.dumps(worker_document(worker)))
        return
    screen = console()
    screen.print(workers_table(found.workers) if found.workers else f"queue {settings.queue} has no workers")
    for line in reasons(found.workers):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(f"backlog: {found.num_waiting}")
    if found.load is not None and any(worker.is_live for worker in found.workers):
        _show(screen, found.load)


def _show(screen: Console, load: QueueLoad) -> None:
    """Prints figures for scaling, as a worker saw them a second or two ago."""
    for band in load.bands:
        screen.print(
            f"priority {band.priority}: {band.num_requests:,} requests, {band.tokens:,} tokens, "
            f"the oldest waits for {band.oldest_s:.0f} s"
        )
    speed = f"{load.tokens_per_s:,.0f} tokens/s" if load.tokens_per_s else "speed not known yet"
    screen.print(
        f"fleet: {load.num_running:,} of {load.slots:,.0f} slots, {speed}; wanted workers: {load.wanted_workers:,}"
    )


async def _look(settings: Settings) -> Snapshot:
    async with connected(settings.redis_url) as redis:
        return await look(redis, settings.queue)
