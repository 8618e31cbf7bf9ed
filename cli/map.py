"""`penstock map`: a file of prompts to a file of replies. Needs the light client only. The run is in `tools/map/`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.sampling import takes_sampling, text_or_file
from penstock.local.progress import shown
from penstock.producer import AsyncClient, BulkProgress, PenstockError, RequestRefused
from penstock.producer.progress import clock
from penstock.tools.map.errors import MapError
from penstock.tools.map.prompts import PromptSource
from penstock.tools.map.run import Counts, MapJob, MapOptions
from penstock.worker.logs import configure_logs
from penstock.worker.settings import Settings

RECONNECT_S = 600.0
"""How long Redis may stay away: a batch outlives a restart of its server."""


@takes_settings(["redis_url", "queue"])
@takes_sampling("id")
def map_rows(
    *,
    settings: Settings,
    sampling: dict[str, Any],
    rows: Annotated[Path, typer.Argument(help="Rows, as .jsonl, .csv, .tsv or .parquet.", metavar="INPUT")],
    output: Annotated[
        Path, typer.Argument(help="Where rows and replies go, as .jsonl, .csv, .tsv or .parquet.", metavar="OUTPUT")
    ],
    column: Annotated[
        str | None,
        typer.Option(help="The prompt's column. [dim]\\[messages, prompt, or the only one][/]", metavar="NAME"),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="The prompt, with columns in braces: 'Translate {text}.'", metavar="TEXT|@FILE")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of each chat.", metavar="TEXT")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Complete texts as they are, without the chat template.")
    ] = False,
    order: Annotated[
        Literal["kept", "free"], typer.Option(help="Replies in the order of the rows, or as they come.")
    ] = "kept",
    in_flight: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 64,
    failures: Annotated[
        Path | None, typer.Option(help="Where failed rows go. [dim]\\[OUTPUT.failures.jsonl][/]", metavar="FILE")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Send rows that failed once more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")] = False,
) -> None:
    """Generate for each row of a file, and write the rows with their replies to another.

    Run the same command again to resume a run that was stopped or killed. It skips rows that have their reply, and
    generates no reply again that Redis still keeps. OUTPUT.job beside the output keeps what that takes.

    Exit status: 0 all rows have their reply; 1 some failed, or the run did; 2 wrong usage; 130 interrupted.
    """
    configure_logs("info", "auto", sys.stderr)
    text = None if template is None else text_or_file(template, "--template")
    options = MapOptions(
        input=rows,
        output=output,
        failures=failures,
        source=PromptSource(column, text, system, plain),
        sampling=sampling,
        in_flight=in_flight,
        is_ordered=order == "kept",
        retries_failed=retry_failed,
    )
    try:
        job = MapJob.of(options)
    except (MapError, RequestRefused) as error:
        raise CommandFailed(str(error), USAGE) from error
    try:
        counts, took_s = asyncio.run(_run(settings, job))
    except MapError as error:
        raise CommandFailed(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command to continue", err=True)
        raise
    _report(counts, took_s, job.failures, as_json=as_json)


async def _run(settings: Settings, job: MapJob) -> tuple[Counts, float]:
    last = BulkProgress()
    async with AsyncClient(settings.address(), queue=settings.queue, reconnect_timeout_s=RECONNECT_S) as client:
        with shown("generating", "rows") as report:

            def show(now: BulkProgress) -> None:
                nonlocal last
                last = now
                if now.total:  # otherwise all rows were there before
                    report(now.done, now.total, _what(now))

            try:
                return await job.run(client, show), last.elapsed_s
            except PenstockError as error:
                if not last.done:
                    raise
                raise CommandFailed(f"{error}; run the same command to continue") from error


def _what(now: BulkProgress) -> str:
    left = "" if now.remaining_s is None else f", {clock(now.remaining_s)} left"
    return f"{now.rate:.1f}/s, {now.failed} failed{left}"


def _report(counts: Counts, took_s: float, failures: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(counts), "seconds": round(took_s, 1)}))
    else:
        before = f"; {counts.done} were there before" if counts.done else ""
        typer.echo(
            f"{counts.answered} rows in {took_s:.1f} s{before}; "
            f"{counts.prompt_tokens} prompt tokens, {counts.completion_tokens} generated"
        )
    if num_failed := counts.failed + counts.failed_before:
        raise CommandFailed(f"{num_failed} rows failed: {failures} says why, and --retry-failed sends them once more")
