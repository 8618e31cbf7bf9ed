"""`penstock drain`: drains workers wherever they run. Needs the light client only."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.draining import UnknownWorker, presence, tell_to_drain
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.settings import Settings

POLL_S = 0.2


@takes_settings(["redis_url", "queue"])
def drain(
    *,
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(help="Workers, as `penstock workers` lists them.", metavar="NAME")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Drain all live workers of the queue.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until they have left.")] = True,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds to wait at most; the workers go on draining.", metavar="NUMBER", min=0.0),
    ] = None,
) -> None:
    """Drain workers by name, wherever they run.

    As with SIGTERM, they take nothing new, finish what fits their drain timeout, and hand the rest to other workers. A
    worker learns of it with its next heartbeat: within a third of the heartbeat's time to live.

    Exit status: 0 all have left (with --no-wait: all were told), 1 one was lost or is still there.
    """
    if bool(names) == everyone:
        raise typer.BadParameter("give either names or --all", param_hint="NAME")
    asyncio.run(_drain(settings, names or [], wait=wait, timeout_s=timeout))


async def _drain(settings: Settings, names: list[str], *, wait: bool, timeout_s: float | None) -> None:
    queue = settings.queue
    async with connected(settings.redis_url) as redis:
        names = list(dict.fromkeys(names)) or await _live(redis, queue)
        try:
            told = {name: await tell_to_drain(redis, queue, name) for name in names}
        except UnknownWorker as error:
            raise CommandFailed(str(error)) from error
        for name in told:
            typer.echo(f"{name}: told to drain")
        if wait:
            await _wait(redis, queue, told, timeout_s)


async def _live(redis: RedisClient, queue: str) -> list[str]:
    names = [worker.name for worker in (await look(redis, queue)).workers if worker.is_live]
    if not names:
        raise CommandFailed(f"queue {queue!r} has no live workers")
    return names


async def _wait(redis: RedisClient, queue: str, told: dict[str, bytes], timeout_s: float | None) -> None:
    started_s = time.monotonic()
    lost = []
    while told:
        for name, instance in tuple(told.items()):
            now = await presence(redis, queue, name, instance)
            if now == "there":
                continue
            del told[name]
            typer.echo(f"{name}: {now} after {time.monotonic() - started_s:.1f} s")
            if now == "lost":
                lost.append(name)
        if told and timeout_s is not None and time.monotonic() - started_s >= timeout_s:
            raise CommandFailed(f"still draining after {timeout_s:g} s: {', '.join(told)}")
        await asyncio.sleep(POLL_S if told else 0)
    if lost:
        raise CommandFailed(f"died or froze while draining, other workers take their requests: {', '.join(lost)}")
