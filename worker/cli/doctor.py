"""`penstock doctor`: says what is wrong here and how to mend it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape

from penstock.worker.cli.checks import Finding
from penstock.worker.cli.checks.host import check_devices, check_packages
from penstock.worker.cli.checks.redis import check_redis
from penstock.worker.cli.console import console
from penstock.worker.cli.errors import missing_worker_extra
from penstock.worker.cli.options import takes_settings
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
    findings = [*check_packages(), *asyncio.run(check_redis(settings.redis_url, settings.queue)), *_engine(settings)]
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        document = {"ok": not failed, "checks": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(findings)
    raise typer.Exit(int(failed))


def _engine(settings: Settings) -> list[Finding]:
    if missing_worker_extra():
        return []
    if settings.model is None:
        mend = "set --model or PENSTOCK_MODEL to a checkpoint's folder, or to demo"
        return [check_devices(), Finding("model", "warn", "none is set, and penstock worker needs one", mend)]
    from penstock.worker.cli.checks.model import check_model  # loads the engine, which a light install does without

    devices = check_devices()
    found = [devices, *check_model(settings.model, settings.dtype)]
    return [*found, *_tpu(settings)] if devices.detail.partition(" x ")[2].startswith("tpu") else found


def _tpu(settings: Settings) -> list[Finding]:
    from penstock.worker.cli.checks.tpu import check_tpu

    return check_tpu(settings.model or "", settings.engine_config())


def _show(findings: list[Finding]) -> None:
    screen = console(soft_wrap=True)
    for finding in findings:
        colour = _COLOURS[finding.status]
        screen.print(f"[{colour}]{finding.status:4}[/] {finding.name:18} {escape(' '.join(finding.detail.split()))}")
        if finding.mend:
            screen.print(f"{'':24}[dim]{escape(finding.mend)}[/]")
