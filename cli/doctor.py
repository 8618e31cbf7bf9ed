"""`penstock doctor`: says what is wrong here and how to fix it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from penstock.cli.checks import Finding
from penstock.cli.checks.host import check_compiler, check_devices, check_packages
from penstock.cli.checks.redis import check_redis
from penstock.cli.shared.errors import missing_worker_extra
from penstock.cli.shared.options import takes_settings
from penstock.local.console import console
from penstock.worker.settings import Settings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@takes_settings(["redis_url", "queue", "model", "dtype"])
def doctor(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check Redis, the model, the devices and the installed packages.

    Exit status: 0 if nothing failed (warnings are fine), else 1.
    """
    screen = console(soft_wrap=True)
    findings: list[Finding] = []
    for look, what in _looks(settings):
        with console(stderr=True).status(f"looking at {what} ..."):
            found = look()
        findings += found
        if not as_json:
            _show(screen, found)
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        document = {"ok": not failed, "checks": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    raise typer.Exit(int(failed))


_Check = Callable[[], list[Finding]]


def _looks(settings: Settings) -> Iterator[tuple[_Check, str]]:
    """Yields the checks, quick ones first: each is run before the next, so their findings show before a slow one."""
    yield check_packages, "the installed packages"
    yield lambda: asyncio.run(check_redis(settings.redis_url, settings.queue)), "Redis"
    if not missing_worker_extra():
        yield lambda: [check_compiler()], "the compiler"
        yield lambda: [check_devices()], "the devices"
        yield partial(_arithmetic, settings), "its matmuls"
        yield partial(_model, settings), "the model"


def _arithmetic(settings: Settings) -> list[Finding]:
    from penstock.cli.checks.arithmetic import check_arithmetic  # loads the engine, which a light install lacks

    config = settings.engine_config()
    return [check_arithmetic(config)]


def _model(settings: Settings) -> list[Finding]:
    if settings.model is None:
        fix = "set --model or PENSTOCK_MODEL to a checkpoint's folder, or to demo"
        return [Finding("model", "warn", "none is set, and penstock worker needs one", fix)]
    from penstock.cli.checks.model import check_model  # loads the engine, which a light install lacks

    return [*check_model(settings.model, settings.engine_config().dtype), *_tpu(settings)]


def _tpu(settings: Settings) -> list[Finding]:
    from penstock.cli.checks.tpu import check_tpu

    return check_tpu(settings.model or "", settings.engine_config())


def _show(screen: Console, findings: list[Finding]) -> None:
    for finding in findings:
        colour = _COLOURS[finding.status]
        screen.print(f"[{colour}]{finding.status:4}[/] {finding.name:18} {escape(' '.join(finding.detail.split()))}")
        if finding.fix:
            screen.print(f"{'':24}[dim]{escape(finding.fix)}[/]")
