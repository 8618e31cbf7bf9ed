"""`penstock tenants`: who waits in a queue, and with what weight. Needs the light client only."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected
from penstock.local.console import console
from penstock.protocol.operations import tenants as of_queue
from penstock.protocol.operations.tenants import MAX_WEIGHT, MIN_WEIGHT, Tenant
from penstock.protocol.wire import ID_PATTERN
from penstock.worker.settings import Settings

tenants = typer.Typer(
    name="tenants",
    help="Tenants of a queue: who waits, what each has been served, and its weight.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_NOBODY = "(none)"  # shown for requests without a tenant


@tenants.command("list")
@takes_settings(["redis_url", "queue"])
def list_tenants(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per tenant.")] = False,
) -> None:
    """List tenants that wait or have a weight.

    `served` counts a prompt token as 1 and a reply token as 2, divided by the weight. Among tenants that wait with the
    same priority, the one with the lowest count is next.
    """
    found = asyncio.run(_look(settings))
    if as_json:
        for tenant in found:
            typer.echo(json.dumps(dataclasses.asdict(tenant)))
        return
    table = Table("tenant", "waiting", "priority", "served", "weight", box=None, header_style="bold")
    for tenant in found:
        priority = "" if tenant.priority is None else str(tenant.priority)
        name = tenant.name or _NOBODY
        table.add_row(name, f"{tenant.num_waiting:,}", priority, f"{tenant.served:,.0f}", f"{tenant.weight:g}")
    console().print(table if found else f"nobody waits in queue {settings.queue}, and no tenant has a weight")


@tenants.command("weight")
@takes_settings(["redis_url", "queue"])
def weight(
    *,
    settings: Settings,
    tenant: Annotated[str, typer.Argument(help="Its name, as in requests.")],
    value: Annotated[
        float,
        typer.Argument(help="Its share relative to other tenants; 1 is the default.", min=MIN_WEIGHT, max=MAX_WEIGHT),
    ],
) -> None:
    """Give a tenant a larger or smaller share of the capacity of the queue's workers."""
    if not ID_PATTERN.fullmatch(tenant):
        raise CommandFailed(f"{tenant!r} is not a tenant: {ID_PATTERN.pattern}", USAGE)
    asyncio.run(_set(settings, tenant, value))
    console().print(f"{tenant} has weight {value:g} in queue {settings.queue}")


async def _look(settings: Settings) -> list[Tenant]:
    async with connected(settings.redis_url) as redis:
        return await of_queue.tenants(redis, settings.queue)


async def _set(settings: Settings, tenant: str, value: float) -> None:
    async with connected(settings.redis_url) as redis:
        await of_queue.set_weight(redis, settings.queue, tenant, value)
