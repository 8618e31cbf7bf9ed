"""`penstock dead`: requests that were given up. Needs the light client only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected, visible
from penstock.cli.shared.times import moment, seconds
from penstock.local.console import console
from penstock.protocol.operations import dead_letters as letters
from penstock.protocol.operations.dead_letters import Kind, Letter
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.settings import Settings

dead = typer.Typer(
    name="dead",
    help="Dead letters, requests that were given up: list, show, replay or purge them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_NOUN: Mapping[Kind, str] = {"request": "dead letter", "malformed": "malformed entry"}
_NOUNS: Mapping[Kind, str] = {"request": "dead letters", "malformed": "malformed entries"}

_Names = Annotated[
    list[str] | None,
    typer.Argument(help="Ids of dead letters (see `penstock dead list`), or of requests.", metavar="LETTER"),
]
_All = Annotated[bool, typer.Option("--all", help="All dead letters that match the other options.")]
_Code = Annotated[str | None, typer.Option(help="Only dead letters with this error code.", metavar="CODE")]
_Malformed = Annotated[
    bool,
    typer.Option("--malformed", help="Malformed entries, instead of requests that were given up."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per dead letter.")]


@dead.command("list")
@takes_settings(["redis_url", "queue"])
def list_letters(
    *,
    settings: Settings,
    malformed: _Malformed = False,
    code: _Code = None,
    limit: Annotated[int, typer.Option(help="Dead letters to list at most.", metavar="NUMBER", min=1)] = 50,
    as_json: _Json = False,
) -> None:
    """List dead letters, the newest first."""
    kind = _kind(malformed)
    found, counts = asyncio.run(_newest(settings, kind, code, limit))
    if as_json:
        for letter in found:
            typer.echo(json.dumps(_document(letter)))
        return
    if found:
        _print_table(found)
    _print_counts(settings.queue, kind, counts, len(found), code)


def _print_table(found: list[Letter]) -> None:
    table = Table(box=None, header_style="bold")
    for title in ("letter", "given up", "request", "code", "crashes"):
        table.add_column(title, overflow="fold", no_wrap=title != "request")
    for letter in found:
        crashes = str(letter.counts.get("crashes", ""))
        cells = (letter.id, moment(letter.given_up_ms), letter.request_id, letter.code, crashes)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console().print(table)


def _print_counts(queue: str, kind: Kind, counts: Mapping[Kind, int], num_shown: int, code: str | None) -> None:
    if not num_shown:
        typer.echo(f"queue {queue} has {counts[kind]} {_NOUNS[kind]}" + (f", none with code {code}" if code else ""))
    elif counts[kind] > num_shown:
        typer.echo(f"{num_shown} of {counts[kind]} {_NOUNS[kind]}; --limit shows more")
    if kind == "request" and counts["malformed"]:
        typer.echo(f"beside them {counts['malformed']} {_NOUNS['malformed']}; --malformed lists these")


@dead.command()
@takes_settings(["redis_url", "queue"])
def show(
    *,
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Id of a dead letter, or of a request.", metavar="LETTER")],
    malformed: _Malformed = False,
    as_json: _Json = False,
) -> None:
    """Show one dead letter: why the request was given up, its history, the request itself."""
    for letter, owners in asyncio.run(_with_owners(settings, _kind(malformed), name)):
        document = {**_document(letter), "claims": [{"epoch": epoch, "worker": worker} for epoch, worker in owners]}
        document["request"] = letter.request() if letter.fields else None
        if as_json:
            typer.echo(json.dumps(document))
        else:
            _print(document)


@dead.command()
@takes_settings(["redis_url", "queue"])
def replay(
    *,
    settings: Settings,
    names: _Names = None,
    everything: _All = False,
    malformed: _Malformed = False,
    code: _Code = None,
) -> None:
    """Send the requests of dead letters again under new ids, and print the ids.

    The old reply keeps its end, so clients must read the reply of the new id. Replaying a letter twice sends its
    request once.

    Exit status: 0 all were sent, 1 some could not be.
    """
    _check_selection(names, everything, code is not None)
    failed = asyncio.run(_replay(settings, _Selection(_kind(malformed), tuple(names or ()), code)))
    if failed:
        raise CommandFailed("; ".join(failed))


@dead.command()
@takes_settings(["redis_url", "queue"])
def purge(
    *,
    settings: Settings,
    names: _Names = None,
    everything: _All = False,
    malformed: _Malformed = False,
    code: _Code = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only dead letters older than this, such as 90m, 12h or 7d.", metavar="AGE")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove dead letters for good, after asking."""
    _check_selection(names, everything, code is not None or older_than is not None)
    min_age_s = None if older_than is None else seconds(older_than, "--older-than")
    kind = _kind(malformed)
    ids = asyncio.run(_ids(settings, _Selection(kind, tuple(names or ()), code, min_age_s)))
    if not ids:
        typer.echo("nothing to remove")
        return
    if not yes:
        typer.confirm(f"remove {len(ids)} {_NOUNS[kind]} of queue {settings.queue}?", abort=True)
    typer.echo(f"removed {asyncio.run(_remove(settings, kind, ids))}")


@dataclass(frozen=True, slots=True)
class _Selection:
    """Selects letters of a kind, by name or all, that also match the other filters."""

    kind: Kind
    names: tuple[str, ...] = ()
    code: str | None = None
    min_age_s: float | None = None

    async def read(self, redis: RedisClient, queue: str) -> AsyncIterator[Letter]:
        """Yields letters, oldest first.

        Raises:
            CommandFailed: a name matches no letter.
        """
        before_ms = None
        if self.min_age_s is not None:
            before_ms = await letters.server_ms(redis, queue) - self.min_age_s * 1000
        async for letter in self._named(redis, queue) if self.names else letters.read_letters(redis, queue, self.kind):
            if self.code not in (None, letter.code) or (before_ms is not None and letter.given_up_ms > before_ms):
                continue
            yield letter

    async def _named(self, redis: RedisClient, queue: str) -> AsyncIterator[Letter]:
        for name in self.names:
            for letter in await _find(redis, queue, self.kind, name):
                yield letter


def _check_selection(names: list[str] | None, everything: bool, is_narrowed: bool) -> None:
    if names and everything:
        raise typer.BadParameter("give either letters or --all", param_hint="LETTER")
    if not (names or everything or is_narrowed):
        raise typer.BadParameter("say which letters, or --all", param_hint="LETTER")


def _kind(malformed: bool) -> Kind:
    return "malformed" if malformed else "request"


async def _newest(settings: Settings, kind: Kind, code: str | None, limit: int) -> tuple[list[Letter], dict[Kind, int]]:
    found: list[Letter] = []
    async with connected(settings.redis_url) as redis:
        counts = {each: int(await redis.xlen(letters.stream_of(settings.queue, each))) for each in letters.KINDS}
        async for letter in letters.read_letters(redis, settings.queue, kind, newest_first=True):
            if code in (None, letter.code):
                found.append(letter)
            if len(found) == limit:
                break
    return found, counts


async def _with_owners(settings: Settings, kind: Kind, name: str) -> list[tuple[Letter, list[tuple[int, str]]]]:
    async with connected(settings.redis_url) as redis:
        found = await _find(redis, settings.queue, kind, name)
        return [(letter, await letters.owners(redis, settings.queue, letter.request_id)) for letter in found]


async def _find(redis: RedisClient, queue: str, kind: Kind, name: str) -> list[Letter]:
    found = await letters.find_letters(redis, queue, name, kind)
    if not found and kind == "request" and await letters.find_letters(redis, queue, name, "malformed"):
        raise CommandFailed(f"queue {queue!r} has {name!r} among its malformed entries: add --malformed")
    if not found:
        raise CommandFailed(f"queue {queue!r} has no {_NOUN[kind]} {name!r}, and none about a request of this id")
    return found


async def _replay(settings: Settings, selection: _Selection) -> list[str]:
    """Prints each id at once, so that an interruption leaves no doubt about what was sent; returns the failures."""
    failed = []
    async with connected(settings.redis_url) as redis:
        async for letter in selection.read(redis, settings.queue):
            try:
                new_id = await letters.replay(redis, settings.queue, letter)
            except letters.NotReplayable as error:
                failed.append(str(error))
                continue
            if new_id is not None:
                typer.echo(new_id)
    return failed


async def _ids(settings: Settings, selection: _Selection) -> list[str]:
    async with connected(settings.redis_url) as redis:
        return [letter.id async for letter in selection.read(redis, settings.queue)]


async def _remove(settings: Settings, kind: Kind, ids: list[str]) -> int:
    async with connected(settings.redis_url) as redis:
        return await letters.remove(redis, settings.queue, kind, ids)


def _document(letter: Letter) -> dict[str, Any]:
    return {
        "letter": letter.id,
        "kind": letter.kind,
        "given_up_at": moment(letter.given_up_ms),
        "request_id": letter.request_id,
        "enqueued_at": None if letter.enqueued_ms is None else moment(letter.enqueued_ms),
        "code": letter.code,
        "message": letter.message,
        "worker": letter.worker,
        **letter.counts,
    }


def _print(document: dict[str, Any]) -> None:
    request, claims = document.pop("request"), document.pop("claims")
    for name, value in document.items():
        typer.echo(f"{name + ':':14}{visible(str(value))}")
    for claim in claims:
        typer.echo(f"{'claim:':14}{claim['epoch']} by {visible(claim['worker'])}")
    shown = "not kept, it was over a limit" if request is None else json.dumps(request, indent=2)
    typer.echo(f"{'request:':14}{shown}")
