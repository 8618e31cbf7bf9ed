"""`penstock pull`: fetches a model before a worker needs it, and looks after those that were fetched."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from penstock.cli.shared.errors import USAGE, CommandFailed, require_worker_extra
from penstock.cli.shared.redis import visible
from penstock.engine.errors import CheckpointError
from penstock.engine.progress import BYTES
from penstock.local.console import console
from penstock.local.progress import shown
from penstock.worker.logs import configure_logs

if TYPE_CHECKING:
    from penstock.engine.loading.naming.cache import CachedModel


def pull(
    model: Annotated[str | None, typer.Argument(help="What `--model` of a worker takes.", metavar="MODEL")] = None,
    *,
    lists: Annotated[bool, typer.Option("--list", help="List the models that were fetched.")] = False,
    removes: Annotated[bool, typer.Option("--remove", help="Delete MODEL from the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON objects, one a line.")] = False,
) -> None:
    """Fetch a model: `smollm2`, an id on the Hugging Face Hub, or the URL of a GGUF file.

    It prints where the model is. A download that was cut off is resumed. The Hub's models are in the cache of its own
    client, which `hf cache` manages; --list and --remove know the others.

    Exit status: 1 it could not be fetched, or is not there to be removed.
    """
    if (model is None) != lists or (lists and removes):
        raise CommandFailed("name a MODEL to fetch or to --remove, or give --list alone", USAGE)
    require_worker_extra()
    configure_logs("info", "auto", sys.stderr)
    try:
        if model is None:
            _list(as_json=as_json)
        elif removes:
            _remove(model)
        else:
            _fetch(model, as_json=as_json)
    except CheckpointError as error:
        raise CommandFailed(str(error)) from error


def _fetch(model: str, *, as_json: bool) -> None:
    from penstock.engine.loading.naming.resolving import is_fetched, local, resolve  # imports what reads checkpoints

    if local(model) is None and is_fetched(model):
        with shown(f"fetching {model}", BYTES) as report:
            path = resolve(model, report)
    else:
        path = resolve(model)
    typer.echo(json.dumps({"model": model, "path": str(path)}) if as_json else str(path))


def _remove(model: str) -> None:
    from penstock.engine.loading.naming.cache import clear

    num_bytes = clear(model)
    if not num_bytes:
        raise CommandFailed(f"{model} is not in the cache: penstock pull --list shows what is")
    typer.echo(f"removed {model}: {decimal(num_bytes)}")


def _list(*, as_json: bool) -> None:
    from penstock.engine.loading.naming.cache import cached_models

    found: list[CachedModel] = cached_models()
    if as_json:
        for each in found:
            typer.echo(json.dumps({"model": each.name, "path": str(each.path), "bytes": each.num_bytes}))
        return
    table = Table("model", "size", "path", box=None)
    for each in found:
        table.add_row(visible(each.name), decimal(each.num_bytes), visible(str(each.path)))
    console().print(table)
