"""`penstock version`."""

from __future__ import annotations

import importlib.metadata

import typer

from penstock.worker.cli.errors import CommandFailed


def version() -> None:
    """Print the version."""
    try:
        typer.echo(importlib.metadata.version("penstock"))
    except importlib.metadata.PackageNotFoundError:
        raise CommandFailed("penstock runs from its source tree and is not installed, so it has no version") from None
