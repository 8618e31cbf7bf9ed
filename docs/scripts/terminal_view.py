"""Draws docs/top.svg: the screen of `penstock top` over a small load, while a worker dies.

    python -m docs.scripts.terminal_view

It starts a server and three workers with the demo model, sends requests of three tenants with three priorities, and
kills a worker. Once the others have taken over its requests, it draws the screen. This takes a minute or two. The
picture is of a real run; another run will differ slightly.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme

from penstock.cli.watching.board import Board
from penstock.cli.watching.screen import screen
from penstock.local.embedded import EmbeddedServer
from penstock.local.worker_process import local_worker, wait_joined
from penstock.producer import AsyncClient
from penstock.protocol.operations.collector import look
from penstock.protocol.operations.snapshot import Snapshot
from penstock.protocol.redis.connection import RedisClient, connect

OUT = Path(__file__).parents[1] / "top.svg"
QUEUE = "stories"
WORKERS = ("one", "two", "three")
SETTINGS: dict[str, Any] = {
    "queue": QUEUE, "model": "demo", "max_num_seqs": 4, "max_batch_tokens": 64, "num_pages": 520, "health_port": None,
    "heartbeat_ttl_s": 3, "drain_timeout_s": 1, "log_level": "error",
}  # fmt: skip
LOAD = (("acme", 5, 40), ("globex", 0, 300), ("initech", 0, 240), ("acme", -5, 300))  # tenant, priority, requests
COLUMNS, ROWS = 112, 31
LOOK_INTERVAL_S, SHOW_INTERVAL_S, WATCH_S = 0.2, 1.0, 120.0
SHOWN_BEFORE = 16

# Like rich's own, without the fonts that it would load from elsewhere: each text states its width.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="penstock top">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.{unique_id}-title {{ font: bold 18px system-ui, Arial, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    with EmbeddedServer() as server:
        OUT.write_text(drawn(asyncio.run(watched(server.url))))
    sys.stdout.write(f"{OUT}\n")


async def watched(url: str) -> Board:
    """Returns the final state of the screen."""
    async with contextlib.AsyncExitStack() as stack:
        processes = []
        for name in WORKERS:  # the first one compiles for all
            process = await stack.enter_async_context(local_worker(url, {**SETTINGS, "name": name}))
            await wait_joined(process, url, QUEUE, name)
            processes.append(process)
        client = await stack.enter_async_context(AsyncClient(url, queue=QUEUE))
        for tenant, priority, count in LOAD:
            for number in range(count):
                await client.submit(
                    f"Tell me a story about {number} birds.",
                    id=f"{tenant}.{number}.{priority}", tenant=tenant, priority=priority,
                    max_tokens=900, ignore_eos=True,
                )  # fmt: skip
        redis = connect(url, decode=False)
        stack.push_async_callback(redis.aclose)
        board = Board(await look(redis, QUEUE))
        await watch(redis, board, lambda _: len(board.history) > SHOWN_BEFORE)
        processes[0].kill()
        await watch(redis, board, shows_a_takeover)
        return board


async def watch(redis: RedisClient, board: Board, is_enough: Callable[[Snapshot], bool]) -> None:
    """Shows once a second what `penstock top` would, and looks more often, as requests come and go.

    Raises:
        TimeoutError: the expected state does not come.
    """
    clock = asyncio.get_running_loop().time
    shown_s, give_up_s = clock(), clock() + WATCH_S
    while clock() < give_up_s:
        await asyncio.sleep(LOOK_INTERVAL_S)
        snapshot = await look(redis, QUEUE)
        if is_enough(snapshot) or clock() >= shown_s + SHOW_INTERVAL_S:
            board.show(snapshot)
            shown_s = clock()
        if is_enough(snapshot):
            return
    workers = {worker.name: worker.state for worker in board.snapshot.workers}
    waiting, running = board.snapshot.num_waiting, board.snapshot.num_running
    raise TimeoutError(f"not so after {WATCH_S:g} s: {waiting} waiting, {running} running, {workers}")


def shows_a_takeover(snapshot: Snapshot) -> bool:
    is_lost = any(worker.state == "lost" for worker in snapshot.workers)
    return is_lost and any(each.takeovers and each.tokens for each in snapshot.running)


def drawn(board: Board, columns: int = COLUMNS, rows: int = ROWS, theme: TerminalTheme = SVG_EXPORT_THEME) -> str:
    """Returns the screen as SVG."""
    console = Console(record=True, file=io.StringIO(), width=columns, height=rows, force_terminal=True, highlight=False)
    console.print(screen(board, columns, rows))
    title = f"penstock top --queue {board.snapshot.queue}"
    svg = console.export_svg(title=title, code_format=FORMAT, unique_id="top", theme=theme)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    main()
