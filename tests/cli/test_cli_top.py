"""`penstock top`, at a terminal with its keys, and for scripts."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import run, top
from penstock.cli.watching.board import Board
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.operations.collector import look
from penstock.protocol.redis import silence
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker import session
from tests.cli.cli_process import Terminal, command, environment
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.processes import ended
from tests.support.programs.worker_harness import read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess
from tests.support.redis_servers.refusing_proxy import PASSING, REFUSED, RefusingProxy

SECRET = "a secret prompt"


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


@asynccontextmanager
async def watching(redis_url: str, *arguments: str) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """Runs `penstock top` at a terminal of its own."""
    with Terminal(40, 140) as terminal:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "top", "--redis-url", redis_url, "--queue", "q", *arguments,
            env=environment(TERM="xterm-256color"), cwd=ROOT,
            stdin=terminal.device, stdout=terminal.device, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            yield terminal, process
        finally:
            await ended(process)


async def test_what_it_shows_and_what_its_keys_do(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GOODBYE_TIMEOUT_S", WAIT_S)
    await redis.xadd(keys.dead("q"), {"id": "gone", "entry": "1-0", "code": "c", "field:prompt": SECRET})
    engine = FakeEngine(step_s=0.01)
    options: dict[str, Any] = {
        "heartbeat_ttl_s": WAIT_S / 10,  # a report lasts as long; a drain is noticed at a third of it
        "drain_timeout_s": 0.1,
    }
    async with running_worker(redis_url, engine, name="w0", **options) as worker:
        await send(redis, prompt=SECRET, id="long", tenant="acme", max_tokens=10**6)
        await read_until(redis, "long", is_chunk)

        async with watching(redis_url, "--interval", "0.2") as (terminal, process):
            modes = termios.tcgetattr(terminal.device)
            await eventually(lambda: "long" in terminal.screen and "gone" in terminal.screen)
            await eventually(lambda: "1 running on 8 slots" in terminal.screen)
            assert "acme" in terminal.screen

            terminal.type("\tc")  # the request
            await eventually(lambda: "[y/N] cancel request long?" in terminal.screen)
            terminal.type("n")
            await eventually(lambda: "cancel: not done" in terminal.screen)
            assert not await redis.exists(keys.cancel("q", "long"))
            terminal.type("c")
            await eventually(lambda: "[y/N] cancel request long?" in terminal.screen)
            terminal.type("y")
            assert (await read_reply(redis, "long")).end.finish_reason == "cancelled"

            terminal.type("\tr")  # the dead letter
            await eventually(lambda: "[y/N] send the request of dead letter" in terminal.screen)
            assert await redis.xlen(keys.dead("q")) == 1
            terminal.type("y")
            await eventually(lambda: "sent again as gone.replay-" in terminal.screen)
            assert await redis.xlen(keys.dead("q")) == 0

            terminal.type("\td")  # the worker
            await eventually(lambda: "[y/N] drain worker w0?" in terminal.screen)
            assert not await redis.exists(keys.drain("q", "w0"))
            terminal.type("y")
            await worker.task
            await eventually(lambda: "no workers" in terminal.screen)

            terminal.type("q")
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert termios.tcgetattr(terminal.device) == modes
            assert SECRET not in terminal.text


async def test_a_killed_worker_is_silent_on_the_screen_then_lost(redis_url: str, tmp_path: Path) -> None:
    with WorkerProcess(redis_url, tmp_path / "log", name="w0", heartbeat_ttl_s=2.0) as worker:
        async with watching(redis_url, "--interval", "0.2") as (terminal, process):
            await eventually(lambda: "1 live" in terminal.screen)
            worker.kill()
            await eventually(lambda: "1 silent" in terminal.screen)
            await eventually(lambda: "1 lost" in terminal.screen)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_redis_goes_away_and_comes_back() -> None:
    with EmbeddedServer() as server:
        port = server.port
        async with watching(server.url, "--interval", "0.2") as (terminal, _):
            await eventually(lambda: "no workers" in terminal.screen)
            server.stop()
            await eventually(lambda: "no newer look: no connection" in terminal.screen)
            with EmbeddedServer(port=port):
                await eventually(lambda: "no newer look" not in terminal.screen)


async def test_it_shows_what_redis_refuses_with_and_goes_on(redis_url: str) -> None:
    async with RefusingProxy(redis_url) as proxy, watching(proxy.url, "--interval", "0.1") as (terminal, process):
        await eventually(lambda: "no workers" in terminal.screen)
        for code, answer in {**PASSING, **REFUSED}.items():
            words = {"script": "ACL failure", "WRONGPASS": "invalid username", "NOAUTH": "Authentication"}
            proxy.refuse(answer)
            await eventually(lambda: "no newer look" in terminal.screen)
            shown = words.get(code, answer.partition(" ")[2][:20])
            await eventually(lambda: shown in terminal.screen)  # noqa: B023
            proxy.allow()
            await eventually(lambda: "no newer look" not in terminal.screen)
        assert process.returncode is None


async def test_for_scripts(redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(step_s=0.01)
    async with running_worker(redis_url, engine, name="w0", heartbeat_ttl_s=WAIT_S):
        await send(redis, prompt=SECRET, id="long", max_tokens=10**6)
        await read_until(redis, "long", is_chunk)

        async def look(*arguments: str) -> str:
            capsys.readouterr()  # the worker's log
            assert await asyncio.to_thread(run, ["top", *arguments, "--redis-url", redis_url, "--queue", "q"]) == 0
            return capsys.readouterr().out

        async def is_reported() -> bool:
            return b"long" in (await raw_report(redis))

        await eventually(is_reported)
        document = json.loads(await look("--json"))
        assert [each["id"] for each in document["running"]] == ["long"]
        assert (document["workers"][0]["name"], document["workers"][0]["slots"]) == ("w0", 8)
        page = await look("--once")
        assert "running requests: 1\n" in page
        assert "long" in page
        assert SECRET not in page + json.dumps(document)
        await redis.set(keys.cancel("q", "long"), 1)


async def raw_report(redis: RedisClient) -> bytes:
    return str(await redis.get(keys.report("q", "w0"))).encode()


def test_without_a_terminal_it_says_what_else_there_is(redis_url: str) -> None:
    done = command("top", "--redis-url", redis_url)
    assert done.status == 1
    assert "--once" in done.err
    assert "--json" in done.err


async def test_what_is_wrong_from_the_start_is_told_as_by_any_command() -> None:
    async with watching("redis://127.0.0.1:1") as (_, process):
        assert process.stderr is not None
        error = await asyncio.wait_for(process.stderr.read(), WAIT_S)
        assert await process.wait() == 1
        assert b"no connection to Redis" in error


@pytest.mark.parametrize("interval", ["0", "61", "x"])
def test_an_interval_out_of_range_is_refused(interval: str) -> None:
    assert command("top", "--interval", interval).status == 2


async def test_one_look_finds_that_all_connections_are_dead(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each dead connection would cost the next look its time."""
    monkeypatch.setattr(top, "ANSWER_S", 0.3)
    async with RefusingProxy(redis_url) as proxy, aclosing(connect(proxy.url, decode=False, retries=0)) as redis:
        board = Board(await look(redis, "q"))
        watch = top._Watch(redis, parse_url(proxy.url), "q", 1.0, board)
        await asyncio.gather(*(redis.ping() for _ in range(8)))
        assert proxy.num_links >= 8
        proxy.forget()
        await watch._look()
        assert "no answer within" in board.trouble
        monkeypatch.setattr(top, "ANSWER_S", WAIT_S)
        monkeypatch.setattr(silence, "ANSWER_S", WAIT_S)  # nothing else finds out
        await watch._look()
        assert not board.trouble
