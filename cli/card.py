"""`penstock card`: what a queue serves. Needs the light client only."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected, visible
from penstock.local.console import console
from penstock.protocol.queue.status import query_card, query_queues
from penstock.protocol.wire import ModelCard
from penstock.worker.settings import Settings


@takes_settings(["redis_url", "queue"])
def card(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the model card of a queue: what its workers serve, and their limits.

    Exit status: 1 if no worker serves it; the message lists the queues that are served.
    """
    found = asyncio.run(_look(settings))
    if as_json:
        typer.echo(found.model_dump_json(exclude_none=True))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.to_fields().items():
        table.add_row(name, visible(value))
    console().print(table)


async def _look(settings: Settings) -> ModelCard:
    async with connected(settings.redis_url) as redis:
        try:
            found = await query_card(redis.execute_command, settings.queue)
        except ValueError as error:
            raise CommandFailed(f"queue {settings.queue}: {error}") from error
        if found is None:
            served = ", ".join(await query_queues(redis.execute_command)) or "none"
            raise CommandFailed(f"queue {settings.queue} has no workers; queues that are served: {served}")
        return found
