"""`penstock keys`: API keys of the gateway. Needs the light client only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.new_key import add_key
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected, visible
from penstock.cli.shared.times import moment, seconds
from penstock.gateway.keys.records import ApiKey, KeyLimits
from penstock.gateway.keys.secrets import new_secret
from penstock.gateway.keys.store import FoundKey, KeyStore
from penstock.local.console import console
from penstock.worker.settings import Settings

keys = typer.Typer(
    name="keys",
    help="API keys of the gateway: create, list or revoke them. Once there is one, every client needs one.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per key.")]
_Limit = Annotated[int | None, typer.Option(metavar="NUMBER", min=1, help="Limit over all gateways together.")]


@keys.command()
@takes_settings(["redis_url"])
def create(
    *,
    settings: Settings,
    name: Annotated[str | None, typer.Option(help="Name in lists and logs; by default the key's id.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of its requests, named in workers' logs.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model or queue that it may use; may be repeated. Default: all.", metavar="NAME"),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also operate queues: see what runs, cancel, drain, replay.")
    ] = False,
    requests_per_minute: _Limit = None,
    tokens_per_minute: _Limit = None,
    max_concurrent: _Limit = None,
    expires_in: Annotated[str | None, typer.Option(help="When it expires, such as 12h or 30d.", metavar="TIME")] = None,
    as_json: _Json = False,
) -> None:
    """Create an API key and print it. It is shown only this once: Redis keeps a hash of it."""
    ttl_s = None if expires_in is None else seconds(expires_in, "--expires-in")
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    wanted = {"name": name, "tenant": tenant, "models": model or None, "limits": limits, "admin": admin}
    secret, key = asyncio.run(_create(settings, wanted, ttl_s))
    if as_json:
        typer.echo(json.dumps({"secret": secret, **_properties(key)}))
        return
    with suppress(OSError):  # a write that fails is ignored: the key itself is what matters
        typer.echo(f"created key {key.id}; it is not shown again:", err=True)
    typer.echo(secret)


@keys.command("list")
@takes_settings(["redis_url"])
def list_keys(*, settings: Settings, as_json: _Json = False) -> None:
    """List API keys, the oldest first. Only their holders know the keys themselves."""
    found = asyncio.run(_list(settings))
    if as_json:
        for each in found:
            typer.echo(json.dumps(_document(each)))
    elif found:
        _print_table(found)
    else:
        typer.echo("there are no keys: the gateway answers everybody")


@keys.command()
@takes_settings(["redis_url"])
def revoke(
    *,
    settings: Settings,
    names: Annotated[list[str], typer.Argument(help="Ids of keys, or names.", metavar="KEY")],
) -> None:
    """Revoke API keys for good. Their open streams end within a second.

    A revoked key stays in the list: without any key, the gateway would answer everybody.
    """
    for key_id, is_new in asyncio.run(_revoke(settings, names)):
        typer.echo(f"{key_id}: revoked" + ("" if is_new else " before"))


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[KeyStore]:
    async with connected(settings.redis_url) as redis:
        yield KeyStore(redis.execute_command)


async def _create(settings: Settings, wanted: dict[str, Any], ttl_s: float | None) -> tuple[str, ApiKey]:
    secret = new_secret()
    async with _opened(settings) as store:
        key = await add_key(store, secret, wanted, ttl_s)
    return secret.text, key


async def _list(settings: Settings) -> list[FoundKey]:
    async with _opened(settings) as store:
        return await store.list()


async def _revoke(settings: Settings, names: Sequence[str]) -> list[tuple[str, bool]]:
    async with _opened(settings) as store:
        there = await store.list()
        ids = [_named(name, there) for name in names]  # resolves all of them before the first is revoked
        return [(key_id, await store.revoke(key_id)) for key_id in ids]


def _named(name: str, there: Sequence[FoundKey]) -> str:
    called = [each for each in there if each.key is not None and each.key.name == name]
    ids = (
        [each.key_id for each in there if each.key_id == name]
        or [each.key_id for each in called if each.state != "revoked"]
        or [each.key_id for each in called[-1:]]
    )
    if not ids:
        raise CommandFailed(f"there is no key {name!r}; `penstock keys list` shows those there are")
    if len(ids) > 1:
        raise CommandFailed(f"several keys are called {name!r}, name one by its id: {', '.join(ids)}")
    return ids[0]


def _document(found: FoundKey) -> dict[str, Any]:
    document = {"id": found.key_id, "state": found.state, "problem": found.problem}
    if found.key is not None:
        document.update(_properties(found.key))
    document["revoked_at"] = None if found.revoked_ms is None else moment(found.revoked_ms)
    return document


def _properties(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "models": None if key.models is None else sorted(key.models),
        **key.limits.model_dump(),
        "admin": key.admin,
        "created_at": moment(key.created_ms),
        "expires_at": None if key.expires_ms is None else moment(key.expires_ms),
    }


def _print_table(found: Sequence[FoundKey]) -> None:
    table = Table(box=None, header_style="bold")
    for title in ("id", "name", "state", "tenant", "models", "limits", "created", "expires"):
        table.add_column(title, overflow="fold", no_wrap=title == "id")
    for each in found:
        table.add_row(*(Text(visible(cell)) for cell in _cells(each)))
    console().print(table)


def _cells(found: FoundKey) -> tuple[str, ...]:
    if found.key is None:
        return (found.key_id, "", f"{found.state}: {found.problem}")
    values = _properties(found.key)
    models = "all" if values["models"] is None else ", ".join(values["models"])
    ends = values["expires_at"] or "never"
    state = f"{found.state}, admin" if found.key.admin else found.state
    return (
        found.key_id, found.key.name, state, found.key.tenant or "", models, _limits(found.key.limits),
        values["created_at"], ends,
    )  # fmt: skip


def _limits(limits: KeyLimits) -> str:
    said = {
        "requests/min": limits.requests_per_minute,
        "tokens/min": limits.tokens_per_minute,
        "at once": limits.max_concurrent,
    }
    return ", ".join(f"{value} {unit}" for unit, value in said.items() if value is not None) or "none"
