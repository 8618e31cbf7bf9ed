"""`penstock workers`: who serves a queue. Needs the light client only."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import suppress
from typing import Annotated

import typer
from redis import exceptions
from rich.console import Console
from rich.table import Table

from penstock.producer.queue_load import QueueLoad, query_load
from penstock.worker.cli.console import console
from penstock.worker.cli.options import takes_settings
from penstock.worker.cli.redis import connected
from penstock.worker.protocol.members import Member, backlog, members
from penstock.worker.settings import Settings

SHOWN_DIGITS = 12  # of a digest


@takes_settings(["redis_url", "queue"])
def workers(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per worker.")] = False,
) -> None:
    """List the workers of a queue, and its backlog.

    `requests` counts those that a worker has taken and not finished; the backlog, those that no worker has. A worker is
    lost when its heartbeat has lapsed: the others take its requests over within seconds. `model` begins the digest of
    the model, its tokenizer and its template: workers that differ in it do not continue each other's replies.
    """
    found, num_waiting, load = asyncio.run(_look(settings))
    if as_json:
        for member in found:
            typer.echo(json.dumps({**dataclasses.asdict(member), "state": _state(member)}))
        return
    table = Table("worker", "state", "requests", "heartbeat expires in", "model", box=None, header_style="bold")
    for member in found:
        left_ms = member.heartbeat_left_ms
        left = "" if left_ms is None else f"{left_ms / 1000:.1f} s"
        model = (member.digest or "")[:SHOWN_DIGITS]
        table.add_row(member.name, _state(member), str(member.num_taken), left, model)
    screen = console()
    screen.print(table if found else f"queue {settings.queue} has no workers")
    screen.print(f"backlog: {num_waiting}")
    if load is not None and any(member.is_live for member in found):
        _show(screen, load)


def _show(screen: Console, load: QueueLoad) -> None:
    """What scaling goes by, as a worker saw it a second or two ago."""
    for band in load.bands:
        screen.print(
            f"priority {band.priority}: {band.num_requests:,} requests, {band.tokens:,} tokens, "
            f"the oldest waits for {band.oldest_s:.0f} s"
        )
    speed = f"{load.tokens_per_s:,.0f} tokens/s" if load.tokens_per_s else "speed not known yet"
    screen.print(
        f"fleet: {load.num_running:,} of {load.slots:,.0f} slots, {speed}; wanted workers: {load.wanted_workers:,}"
    )


async def _look(settings: Settings) -> tuple[list[Member], int, QueueLoad | None]:
    async with connected(settings.redis_url) as redis:
        found = await members(redis, settings.queue)
        num_waiting = await backlog(redis, settings.queue, found)
        with suppress(ValueError, exceptions.NoPermissionError):
            return found, num_waiting, await query_load(redis.execute_command, settings.queue)
        return found, num_waiting, None


def _state(member: Member) -> str:
    if not member.is_live:
        return "lost"
    return "draining" if member.is_draining else "live"
