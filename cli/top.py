"""`penstock top`: a queue, live. Needs the light client only."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Annotated, Any

import typer
from redis import exceptions
from rich.console import Console
from rich.live import Live

from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected
from penstock.cli.watching.board import Action, Board, Quit
from penstock.cli.watching.keyboard import pressed
from penstock.cli.watching.screen import page, screen
from penstock.local.console import console
from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, PenstockError
from penstock.protocol.operations import dead_letters
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.draining import UnknownWorker, tell_to_drain
from penstock.protocol.operations.snapshot import Snapshot
from penstock.protocol.queue.cancelling import cancel
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, answered, connect
from penstock.protocol.redis.moves import Witness, drop_connections
from penstock.protocol.tasks import end_tasks
from penstock.worker.settings import Settings

ANSWER_S = 2.0
"""Seconds without an answer after which the screen says so."""


@takes_settings(["redis_url", "queue"])
def top(
    *,
    settings: Settings,
    interval: Annotated[
        float, typer.Option(help="Seconds between two updates.", metavar="NUMBER", min=0.1, max=60.0)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object and exit.")] = False,
) -> None:
    """Watch a queue: workers, lanes, requests, dead letters, tokens per second. Drain, cancel and replay by key.

    Tab goes from table to table, the arrows from row to row. d drains the selected worker, c cancels the selected
    request, r replays the selected dead letter; each asks first. q quits.

    A worker that was killed or froze is shown as silent within two seconds. It is lost once its heartbeat has lapsed.
    """
    if as_json or once:
        snapshot = asyncio.run(_look_once(settings))
        if as_json:
            typer.echo(json.dumps(snapshot.to_document()))
        else:
            console().print(page(snapshot))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandFailed("top needs a terminal: --once prints one view, --json one look for programs")
    asyncio.run(_watch(settings, interval))


async def _look_once(settings: Settings) -> Snapshot:
    async with connected(settings.redis_url) as redis:
        return await look(redis, settings.queue)


async def _watch(settings: Settings, interval_s: float) -> None:
    first = await _look_once(settings)  # problems at the start end the command like any other
    address = parse_url(settings.redis_url)
    redis = connect(address, decode=False, retries=0, name="penstock-top")
    try:
        await _Watch(redis, address, settings.queue, interval_s, Board(first)).run()
    finally:
        await redis.aclose()


class _Watch:
    """Looks, shows, and does what keys ask for, until told to end."""

    def __init__(self, redis: RedisClient, address: Address, queue: str, interval_s: float, board: Board) -> None:
        self._redis = redis
        self._address = address
        self._queue = queue
        self._interval_s = interval_s
        self._board = board
        self._witness = Witness("SET", keys.drain(queue, "penstock-top"), "", "XX")  # no worker has that name
        self._has_ended = asyncio.Event()
        self._live = Live(console=Console(highlight=False, emoji=False), screen=True, auto_refresh=False)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._has_ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        with self._live, pressed(sys.stdin.fileno(), self._press):
            self._draw()
            looking = self._begin(self._keep_looking())
            ended = asyncio.create_task(self._has_ended.wait())
            try:
                await asyncio.wait({looking, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks([ended, *self._tasks])
        if not looking.cancelled() and (error := looking.exception()) is not None:
            raise error

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _draw(self) -> None:
        size = self._live.console.size
        self._live.update(screen(self._board, size.width, size.height), refresh=True)

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            await self._look()
            self._draw()
            await asyncio.sleep(max(0.0, begun_s + self._interval_s - loop.time()))

    async def _look(self) -> None:
        try:
            async with answered(self._address, ANSWER_S):
                await self._ask_witness()
                self._board.show(await look(self._redis, self._queue))
        except PenstockError as error:
            self._board.trouble = str(error)
            if isinstance(error, ConnectionLost):
                drop_connections(self._redis)  # idle ones may be dead as well, and each would cost `ANSWER_S`

    async def _ask_witness(self) -> None:
        """Checks for writes: a demoted server would show old data forever."""
        command = self._witness.due()
        if command is not None:
            with suppress(exceptions.ResponseError):
                await self._redis.execute_command(*command)

    def _press(self, key: str) -> None:
        try:
            action = self._board.press(key)
        except Quit:
            self._has_ended.set()
            return
        if action is not None:
            self._begin(self._do(action))
        self._draw()

    async def _do(self, action: Action) -> None:
        try:
            async with answered(self._address, ANSWER_S):
                self._board.note = await self._done(action)
        except (PenstockError, UnknownWorker, dead_letters.NotReplayable) as error:
            self._board.note = f"{action.deed}: {error}"
        self._draw()

    async def _done(self, action: Action) -> str:
        if action.deed == "drain":
            await tell_to_drain(self._redis, self._queue, action.target)
            return f"worker {action.target} was told to drain"
        if action.deed == "cancel":
            await cancel(self._redis, self._queue, action.target)
            return f"request {action.target} was told to end"
        found = await dead_letters.find_letters(self._redis, self._queue, action.target)
        new_id = await dead_letters.replay(self._redis, self._queue, found[0]) if found else None
        return f"dead letter {action.target} has gone" if new_id is None else f"sent again as {new_id}"
