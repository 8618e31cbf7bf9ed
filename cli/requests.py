"""`penstock requests`: what runs and what waits, and how to end it. Needs the light client only."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated, Any

import typer

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected, visible
from penstock.cli.watching.view import duration, running_table, waiting_table
from penstock.local.console import console
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.requests import RequestView, look_up
from penstock.protocol.operations.snapshot import Snapshot
from penstock.protocol.operations.waiting import WaitingRequest, next_to_run
from penstock.protocol.queue.cancelling import cancel as cancel_request
from penstock.protocol.wire import ID_PATTERN
from penstock.worker.settings import Settings

MAX_LISTED = 1_000_000  # all of them are held in memory before they are printed

requests = typer.Typer(
    name="requests",
    help="Requests of a queue: list what runs or waits, look one up, or cancel. Their text is never shown.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Ids = Annotated[list[str], typer.Argument(help="Ids of requests.", metavar="ID")]


@requests.command("list")
@takes_settings(["redis_url", "queue"])
def list_requests(
    *,
    settings: Settings,
    waiting: Annotated[bool, typer.Option("--waiting", help="Requests that wait, instead of those that run.")] = False,
    worker: Annotated[str | None, typer.Option(help="Only requests of this worker.", metavar="NAME")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.", metavar="NAME")] = None,
    limit: Annotated[int, typer.Option(help="Requests to list at most.", metavar="NUMBER", min=1, max=MAX_LISTED)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per request.")] = False,
) -> None:
    """List the requests that workers have, the oldest first; with --waiting those that wait, the next first.

    Workers report their requests twice a second. A waiting request is shown with the id of its queue entry, because its
    own id is in its body, which is not read. If it has no id of its own, the two are the same.
    """
    if waiting and worker is not None:
        raise typer.BadParameter("waiting requests have no worker", param_hint="--worker")
    found = asyncio.run(_list(settings, waiting=waiting, worker=worker, tenant=tenant, limit=limit))
    if as_json:
        for each in found.shown:
            typer.echo(json.dumps(dataclasses.asdict(each)))
        return
    noun = "waiting" if waiting else "running"
    if not found.shown:
        of_others = ", none of them such" if found.total else ""
        typer.echo(f"queue {settings.queue} has {found.total:,} {noun} requests{of_others}")
        return
    console().print(waiting_table(found.shown) if waiting else running_table(found.shown))
    if found.total > len(found.shown):
        typer.echo(f"{len(found.shown)} of {found.total:,} {noun} requests")


@requests.command()
@takes_settings(["redis_url", "queue"])
def show(
    *,
    settings: Settings,
    request_id: Annotated[str, typer.Argument(help="Id of a request.", metavar="ID")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the state of one request: where it is, who had it, how far it is. Its text is not read.

    Exit status: 0 it is known, 1 it is not.
    """
    _check(request_id)
    view = asyncio.run(_look_up(settings, request_id))
    if as_json:
        typer.echo(json.dumps(_document(view)))
    elif view.state != "unknown":
        _print(view)
    if view.state == "unknown":
        raise CommandFailed(_unknown(settings.queue, request_id))


@requests.command()
@takes_settings(["redis_url", "queue"])
def cancel(
    *,
    settings: Settings,
    ids: _Ids,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Cancel requests, after asking. A request that runs or waits ends within a second or so, with its text so far.

    Exit status: 0 all were flagged, 1 one had ended or is not known. An unknown one is flagged all the same, and ends
    if it waits.
    """
    for request_id in ids:
        _check(request_id)
    named = f"request {ids[0]}" if len(ids) == 1 else f"{len(ids)} requests"
    if not yes:
        typer.confirm(f"cancel {named} of queue {settings.queue}?", abort=True)
    failed = [why for request_id in dict.fromkeys(ids) if (why := asyncio.run(_cancel(settings, request_id)))]
    if failed:
        raise CommandFailed("; ".join(failed))


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    shown: list[Any]
    total: int  # before any are left out


async def _list(settings: Settings, *, waiting: bool, worker: str | None, tenant: str | None, limit: int) -> _Found:
    async with connected(settings.redis_url) as redis:
        snapshot = await look(redis, settings.queue)
        if waiting:
            next_ones: list[WaitingRequest] = await next_to_run(redis, settings.queue, limit=limit, tenant=tenant)
            return _Found(next_ones, snapshot.num_waiting)
    return _running(snapshot, worker, tenant, limit)


def _running(snapshot: Snapshot, worker: str | None, tenant: str | None, limit: int) -> _Found:
    found = [each for each in snapshot.running if worker in (None, each.worker) and tenant in (None, each.tenant or "")]
    return _Found(found[:limit], snapshot.num_running)


async def _look_up(settings: Settings, request_id: str) -> RequestView:
    async with connected(settings.redis_url) as redis:
        return await look_up(redis, settings.queue, request_id)


async def _cancel(settings: Settings, request_id: str) -> str | None:
    """Cancels; returns why there may have been nothing to cancel."""
    async with connected(settings.redis_url) as redis:
        view = await look_up(redis, settings.queue, request_id)
        if view.state == "ended":
            return f"{request_id} has ended ({view.finish_reason or 'its reply is gone'})"
        await cancel_request(redis, settings.queue, request_id)
    if view.state == "unknown":
        return _unknown(settings.queue, request_id)
    typer.echo(f"{request_id}: told to end ({view.state})")
    return None


def _check(request_id: str) -> None:
    if not ID_PATTERN.fullmatch(request_id):
        raise CommandFailed(f"{request_id!r} is not the ID of a request: {ID_PATTERN.pattern}", exit_status=2)


def _unknown(queue: str, request_id: str) -> str:
    return f"queue {queue!r} knows of no request {request_id!r}"


def _document(view: RequestView) -> dict[str, Any]:
    claims = [{"epoch": epoch, "worker": worker} for epoch, worker in view.claims]
    return {**dataclasses.asdict(view), "claims": claims, "takeovers": view.takeovers}


def _print(view: RequestView) -> None:
    document = _document(view)
    claims = document.pop("claims")
    if view.age_s is not None:
        document["age_s"] = duration(view.age_s)
    for name, value in document.items():
        if value is not None:
            typer.echo(f"{name.removesuffix('_s').replace('_', ' ') + ':':16}{visible(str(value))}")
    for claim in claims:
        typer.echo(f"{'claim:':16}{claim['epoch']} by {visible(claim['worker'])}")
