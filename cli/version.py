"""`penstock version` and `penstock --version`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.protocol.version import __version__


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _show(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show, is_eager=True, help="Print the version and exit.")
]
