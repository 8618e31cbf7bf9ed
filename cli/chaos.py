"""`penstock chaos`: tests the delivery promises here. The run is in `tools/chaos/`."""

from __future__ import annotations

import secrets
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from redis.exceptions import RedisError

from penstock.cli.shared.errors import CommandFailed, require_worker_extra
from penstock.local.console import console
from penstock.local.embedded import EmbeddedServerError
from penstock.local.progress import shown
from penstock.tools.chaos.plan import ChaosOptions
from penstock.worker.logs import configure_logs

if TYPE_CHECKING:
    from penstock.tools.chaos.run import ChaosOutcome


def chaos(
    *,
    requests: Annotated[int, typer.Option(help="Requests to send.", min=1)] = 500,
    kills: Annotated[int, typer.Option(help="Workers to kill with SIGKILL.", min=0)] = 20,
    zombies: Annotated[int, typer.Option(help="Workers to freeze for longer than their heartbeat lasts.", min=0)] = 10,
    restarts: Annotated[
        int | None,
        typer.Option(help="Server restarts; with --redis-url there are none. [dim]\\[2][/]", metavar="NUMBER", min=0),
    ] = None,
    losses: Annotated[int, typer.Option(help="Commands and answers that are lost or late.", min=0)] = 20,
    workers: Annotated[int, typer.Option(help="Workers that run at once.", min=1)] = 4,
    engine: Annotated[
        Literal["fake", "model"], typer.Option(help="fake: fast, thousands of requests. model: the real one.")
    ] = "fake",
    model: Annotated[str, typer.Option(help="A checkpoint's folder, or demo.")] = "demo",
    seed: Annotated[
        int | None, typer.Option(help="Replay the run with this seed. [dim]\\[random][/]", metavar="NUMBER", min=0)
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="A deployment to use; otherwise a server is started.", metavar="TEXT")
    ] = None,
) -> None:
    """Test the delivery guarantees: kill, freeze and cut off workers, and check every token.

    Clients check that no token is lost, repeated, out of order or wrong. The command starts workers, proxies and
    clients here, in a queue of their own, and stops them at the end.

    Exit status: 0 all promises were kept; 1 one was broken, or the run failed; 2 wrong usage; 130 interrupted.
    """
    require_worker_extra()
    if redis_url is not None and restarts:
        raise typer.BadParameter(
            f"the server at --redis-url is not restarted, leave out {restarts}", param_hint="--restarts"
        )
    if restarts is None:
        restarts = 0 if redis_url is not None else min(2, requests)
    configure_logs("info", "auto", sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = secrets.randbelow(2**32) if seed is None else seed
    try:
        has_chats = engine == "model" and model == "demo"
        options = ChaosOptions(seed, requests, kills, zombies, restarts, losses, workers, engine, has_chats)
        _report(_run(options, redis_url, model), seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _run(options: ChaosOptions, redis_url: str | None, model: str) -> ChaosOutcome:
    from penstock.tools.chaos.launch import launch  # loads jax

    console().print(f"seed {options.seed}")
    try:
        with shown("running requests", "replies") as report:
            return launch(options, redis_url=redis_url, model=model, progress=report)
    except (EmbeddedServerError, RedisError) as error:
        raise CommandFailed(str(error)) from error


def _report(outcome: ChaosOutcome, seed: int) -> None:
    from penstock.tools.chaos.report import as_text

    console(soft_wrap=True).print(as_text(outcome), markup=False)
    if not outcome.verdict.is_kept:
        raise CommandFailed(
            f"{len(outcome.verdict.problems)} broken promises; the workers' logs are in {outcome.logs}; "
            f"to replay this run: --seed {seed}"
        )
