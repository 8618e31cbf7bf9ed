"""Every screen, drawn into `build/pictures/`: `make pictures`. What a program can see fails; look at the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme

from docs.scripts import terminal_view
from penstock.cli.watching.board import Board
from penstock.local.embedded import EmbeddedServer
from penstock.protocol.operations.reports import WorkerReport
from penstock.protocol.operations.snapshot import DeadLetter, Lane, RunningRequest, Snapshot, TenantLane, Worker
from penstock.protocol.redis.connection import RedisClient
from tests.clients.shots import Answer, Shot, drawn
from tests.support.packages import ROOT
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import announce, new_key, running_gateway

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

MARKDOWN = """\
## A heading, and what follows it

A paragraph with **strong words**, `code` and [a link](https://example.org/), long enough for more than one line.

1. first
2. second, with a longer text that has to be broken on a narrow screen somewhere in the middle of it
   - nested

```python
def settle(requests: list[Request], lease_s: float = 30.0) -> dict[str, Outcome]:  # a line that is wider than the page
    return {request.id: Outcome(request) for request in requests}
```

A_word_without_any_place_to_break_it_such_as_the_path_of_a_file_or_a_long_address_of_something_somewhere_else_entirely.
"""
QUESTIONS = ("Tell me a short story about a turtle.", "Show me what you can write.")


async def converse(reply: ScriptedReply) -> None:
    """Answers at length, with an error, or not to the end, as the question says."""
    question = str((reply.request.messages or [])[-1].content)
    await reply.own()
    await reply.chunk(MARKDOWN if "Show" in question else "Once there was a turtle, which was never late.")
    if "for ever" in question:
        await reply.cancelled()
        await reply.end("cancelled")
    elif "break" in question:
        await reply.end("error", code="engine_error", message="the engine broke: RESOURCE_EXHAUSTED while decoding")
    else:
        await reply.end("stop")


async def test_the_page_to_chat_on(redis: RedisClient, redis_url: str, tmp_path: Path) -> None:
    async with running_gateway(redis_url) as gateway, ScriptedWorker(redis_url, converse):
        await announce(redis)
        chatting: tuple[tuple[str, ...], ...] = (("wait", "#model option"),)
        for place, question in enumerate(QUESTIONS, start=1):
            answered = f"#messages li.assistant:nth-of-type({2 * place}) footer:not(:empty)"
            chatting += (("type", "#text", question), ("press", "Enter"), ("wait", answered))
        failing = (("type", "#text", "Now break."), ("press", "Enter"), ("wait", "#messages li.error"))
        answering = (
            ("type", "#text", "Talk for ever."),
            ("press", "Enter"),
            ("said", "#messages li:last-child", "turtle"),
        )
        url = f"{gateway.url}/"
        shots = [
            Shot("chat-empty", url, chatting[:1]),
            Shot("chat", url, chatting),
            Shot("chat-answering", url, (*chatting[:4], *answering)),
            Shot("chat-error", url, (*chatting[:4], *failing)),
            Shot("chat-wrong-field", url, (*chatting[:1], ("type", "#more", "{"), ("type", "#text", "a\n"))),
            Shot("api", f"{gateway.url}/docs"),
        ]
        await draw_on_every_screen(shots, tmp_path)


async def test_the_page_to_chat_on_where_something_is_missing(redis_url: str, tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        async with running_gateway(server.url, redis_timeout_s=1.0) as gateway:
            url = f"{gateway.url}/"
            no_worker = Shot("chat-no-worker", url, (("said", ".problem:not([hidden])", "No worker"),))
            await draw_on_every_screen([no_worker], tmp_path)
            await new_key(server.url)
            no_key = Shot("chat-no-key", url, (("said", ".problem:not([hidden])", "API key"),))
            await draw_on_every_screen([no_key], tmp_path)
            server.stop()
            no_redis = Shot("chat-no-redis", url, (("said", "#status", "e"),))
            await draw_on_every_screen([no_redis], tmp_path)


REPORT: dict[str, Any] = {
    "version": "0.1.0", "phase": "serving", "model": "org/tiny-model-of-a-long-name-Instruct", "device": "NVIDIA H100",
    "slots": 64, "running_sequences": 60, "waiting_sequences": 3, "pages": 4000, "free_pages": 500, "cached_pages": 900,
    "tokens_per_s": 1834.0, "heartbeat_ttl_ms": 10_000,
}  # fmt: skip
OUT_OF_MEMORY = (
    "the device has 3 pages of 16 tokens left, and a prompt needs 256: RESOURCE_EXHAUSTED: Out of memory "
    "while trying to allocate 8589934592 bytes; lower max_model_len or num_pages"
)


def worker(name: str, *, heartbeat_left_ms: int | None = 8000, is_draining: bool = False, **report: Any) -> Worker:
    reported_s = 4.0 if name == "frozen" else 0.2
    made = WorkerReport(**{**REPORT, **report})
    return Worker(name, 60, heartbeat_left_ms, is_draining, "c0ffee" * 8, made, reported_s)


def busy() -> Snapshot:
    """Returns a queue in which everything is wrong that can be."""
    workers = (
        worker("gpu-one"), worker("gpu-two", is_draining=True), worker("gpu-three", unready=OUT_OF_MEMORY),
        worker("starting", heartbeat_left_ms=None, phase="starting", unready="loading weights: 12 of 30 GB"),
        worker("frozen"), Worker("a-worker-whose-name-is-that-of-its-pod-7d9f8b6c5-x2x9k", 4, None, is_draining=False),
    )  # fmt: skip
    running = tuple(
        RunningRequest(
            f"9f86d081884c7d659a2feaa0c55ad015.{place}", "gpu-one", "acme", "running", 75.0, 3.0, 700, 1500, place % 3
        )
        for place in range(12)
    )
    tenants = (TenantLane("acme", 5, 12, 77.0), TenantLane("", 1, 2, 3.0))
    letters = (DeadLetter("1700000000000-0", "9f86d081884c7d65", "too_many_crashes", "gpu-one", 4000.0, 3),)
    lanes = (Lane(5, 12, 3400, 90.0, 2, tenants), Lane(0, 1200, 340_000, 4000.0, 1, tenants[:1]))
    return Snapshot(
        "stories", 10_000, workers, running, 1212, 0, 4000.0, lanes, load=None, card=None, num_dead=1, num_malformed=2,
        letters=letters,
    )  # fmt: skip


def empty() -> Snapshot:
    return Snapshot("stories", 10_000, (), (), 0, 0, None, (), None, None, num_dead=0, num_malformed=0, letters=())


async def test_the_page_for_operators(redis: RedisClient, tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        async with running_gateway(server.url, queues=("stories",), redis_timeout_s=1.0) as gateway:
            url = f"{gateway.url}/operations"
            secret = await new_key(server.url, admin=True)
            session = {"penstock-admin-key": secret.text}
            full, none = (Answer("/operations/queues/stories", each.to_document()) for each in (busy(), empty()))
            there, asking = ("wait", "#letters button"), ("click", "#workers button")
            shots = [
                Shot("operations-no-key", url, (("said", "#status", "An admin key is needed"),)),
                Shot("operations", url, (there,), session, full),
                Shot("operations-asking", url, (there, asking), session, full, is_asking=True),
                Shot(
                    "operations-answered", url,
                    (there, asking, ("click", "#sure [value=no]"), ("said", "#status", "not done")),
                    session, full,
                ),
                Shot("operations-empty", url, (("said", "#summary", "no workers"),), session, none),
            ]  # fmt: skip
            await draw_on_every_screen(shots, tmp_path)
            server.stop()
            shots = [Shot("operations-no-redis", url, (("said", "#status", "e"),), session)]
            await draw_on_every_screen(shots, tmp_path)


def boards() -> Iterator[tuple[str, Board]]:
    """Yields boards of `penstock top` with the names of their pictures."""
    board = Board(busy())
    for rate in range(40):
        board.history.append(1000 + 40 * (rate % 9))
    yield "top", board
    asked = Board(busy())
    asked.press("d")
    yield "top-asking", asked
    yield "top-empty", Board(empty())
    gone = Board(busy())
    gone.trouble = "no connection to redis://127.0.0.1:6379/0: Connection refused"
    yield "top-no-redis", gone


TERMINALS: dict[str, tuple[int, int, TerminalTheme]] = {
    "light": (120, 36, DEFAULT_TERMINAL_THEME), "dark": (120, 36, SVG_EXPORT_THEME),
    "narrow": (80, 24, SVG_EXPORT_THEME), "phone": (50, 30, SVG_EXPORT_THEME),
}  # fmt: skip


async def test_the_view_at_a_terminal(tmp_path: Path) -> None:
    shots = []
    for name, board in boards():
        for size, (columns, rows, theme) in TERMINALS.items():
            picture = tmp_path / f"{name}-{size}.svg"
            picture.write_text(terminal_view.drawn(board, columns, rows, theme))
            shots.append(Shot(picture.stem, picture.as_uri(), is_judged=False))
    await draw(shots, tmp_path)


PAGES = ("index", "tutorial", "configuration", "gateway", "reference/clients", "decisions/streams", "architecture")


async def test_the_site(tmp_path: Path) -> None:
    """Reads it from a disk, as who has it in a folder does."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    built = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    shots = [Shot(f"site-{page.replace('/', '-')}", (site / f"{page}.html").as_uri()) for page in PAGES]
    searching = (("type", "[data-md-component=search-query]", "heartbeat"), ("wait", ".md-search-result__item"))
    shots.append(Shot("site-search", (site / "index.html").as_uri(), searching))
    await draw_on_every_screen(shots, tmp_path)


async def draw_on_every_screen(shots: list[Shot], scratch: Path) -> None:
    await draw([each for shot in shots for each in shot.on_every_screen()], scratch)


async def draw(shots: list[Shot], scratch: Path) -> None:
    faults = await drawn(shots, scratch)
    assert not faults, "\n" + "\n".join(faults)
