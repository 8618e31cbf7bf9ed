"""Signals to worker and gateway at each moment of a start, of serving, of a drain and of a stop."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from penstock import stopping
from penstock.cli.shared import serve
from penstock.protocol import keys
from penstock.protocol.redis import renewal, tls
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry
from penstock.stopping import SAME_STOP_S, Stopping, listen_early
from penstock.worker.service import WorkerService
from tests.cli.cli_process import environment, finish, finish_by
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually, slow
from tests.support.programs.worker_harness import read_until, send

PROGRAMS = ROOT / "tests/support/programs"
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class FakeLoop:
    """Does what is asked for at once."""

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        callback()

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        callback()

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None: ...

    def remove_reader(self, fd: int) -> None: ...


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("came", "done"),
    [
        ([(0.0, TERM)], ["stop"]),
        ([(0.0, TERM), (0.0, TERM), (0.9, INT)], ["stop"]),
        ([(0.0, INT), (SAME_STOP_S, TERM)], ["stop", "stop"]),
        ([(0.0, HUP), (0.1, HUP), (0.2, TERM), (0.3, HUP), (5.0, HUP)], ["reload", "reload", "stop"]),
        ([(0.0, HUP), (2.0, TERM), (2.5, TERM), (3.0, TERM)], ["reload", "stop", "stop"]),
        ([(0.0, "the terminal goes"), (0.1, HUP), (0.2, HUP), (0.3, TERM)], ["stop"]),
        ([(0.0, "the terminal goes"), (0.1, HUP), (1.5, TERM)], ["stop", "stop"]),
    ],
)
def test_what_comes_in_which_order(
    came: list[tuple[float, Any]], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, there = Clock(), [True]
    monkeypatch.setattr(stopping, "time", clock)
    monkeypatch.setattr(stopping, "is_at_terminal", lambda: there[0])
    heard: list[str] = []
    signals = Stopping()
    with signals.serving(FakeLoop(), lambda: heard.append("stop"), lambda: heard.append("reload")):
        for at, number in came:
            clock.now = 100.0 + at
            if isinstance(number, str):
                there[0] = False
            else:
                signals._receive(number, None)
    assert heard == done
    clock.now += 10.0
    signals._receive(TERM, None)  # it is over
    assert heard == done


@pytest.mark.parametrize("first", [TERM, HUP])
def test_what_a_busy_loop_comes_to_late_came_when_it_came(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the terminal has gone."""
    clock = Clock()
    monkeypatch.setattr(stopping, "time", clock)
    terminals = iter([True])
    monkeypatch.setattr(stopping, "is_at_terminal", lambda: next(terminals, False))
    waiting: list[Callable[[], object]] = []
    loop = FakeLoop()
    monkeypatch.setattr(loop, "call_soon_threadsafe", waiting.append)
    heard: list[str] = []
    signals = Stopping()
    with signals.serving(loop, lambda: heard.append("stop"), lambda: heard.append("reload")):
        signals._receive(first, None)
        signals._receive(INT, None)
        for callback in waiting:
            callback()
            clock.now += 10 * SAME_STOP_S
    assert heard == ["stop"]


async def test_a_worker_looks_at_files_of_redis_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()
    monkeypatch.setattr(renewal, "LOOK_S", 0.01)
    monkeypatch.setattr(tls, "look_again", looked.set)

    class Service:
        async def run(self) -> None:
            await asyncio.wait_for(looked.wait(), WAIT_S)

        def request_drain(self) -> None: ...

    await serve._run(cast("WorkerService", Service()), Stopping())
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("is_loop_s_own", [False, True])
async def test_a_signal_that_another_thread_gets_wakes_the_loop(is_loop_s_own: bool) -> None:
    loop, came = asyncio.get_running_loop(), threading.Event()
    if is_loop_s_own:
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)  # it has its own way to be woken

    def send_and_wait() -> bool:
        time.sleep(0.1)  # by then the loop waits, or else there is nothing to see
        signal.pthread_kill(threading.get_ident(), HUP)
        return came.wait(WAIT_S)

    signals = Stopping()
    signals.listen()
    try:
        with signals.serving(loop, lambda: None, came.set):
            assert await asyncio.to_thread(send_and_wait)
    finally:
        signals.give_up()
        loop.remove_signal_handler(signal.SIGUSR2)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("python -m penstock worker --model x", True),
        ("/usr/bin/python /opt/penstock/bin/penstock gateway", True),
        ("penstock worker", True),
        ("python -m penstock send worker", False),
        ("python -m penstock", False),
        ("python -m pytest penstock worker", False),
        ("python -m penstock.engine.kernels.cpu worker", False),
    ],
)
def test_only_a_service_listens_early(words: str, is_one: bool) -> None:
    assert stopping._is_service(words.split()) is is_one
    before = signal.getsignal(TERM)
    listen_early([] if is_one else words.split())
    assert signal.getsignal(TERM) is before


FAKE_WORKER = [str(PROGRAMS / "fake_service.py"), "worker", "--model", "fake", "--queue", "q", "--health-port", "none"]
COMMANDS = {
    "worker": FAKE_WORKER,
    "gateway": ["-m", "penstock", "gateway", "--port", "0"],
    "gateways": ["-m", "penstock", "gateway", "--port", "0", "--workers", "2"],
}
READY = {"worker": "joined", "gateway": "listening", "gateways": "process_started"}


WITH_SIGNALS_BLOCKED = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@asynccontextmanager
async def running(
    *command: str, ignored: str = "", is_blocked: bool = False, stdin: int = subprocess.DEVNULL
) -> AsyncIterator[Any]:
    """Runs a command in a session of its own. `ignored`: signals ignored at its start; `is_blocked`: whether all are
    blocked.
    """
    words = [sys.executable, *command]
    if is_blocked:
        words = [sys.executable, "-c", WITH_SIGNALS_BLOCKED, *command]
    if ignored:
        words = ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh", *words]
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, env=environment(), stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def until(process: Any, event: str, count: int = 1) -> None:
    while count:
        line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        assert line, f"it ended before {event}"
        with suppress(ValueError):
            count -= json.loads(line)["event"] == event


def service(name: str, redis_url: str) -> list[str]:
    return [*COMMANDS[name], "--redis-url", redis_url, "--log-format", "json", "--drain-timeout-s", "60"]


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def catches(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("delay_s", [0.0, 0.3, slow(0.1), slow(0.6), slow(1.0), slow(1.5), slow(2.5)])
@pytest.mark.parametrize("name", ["worker", slow("gateway"), slow("gateways")])
@pytest.mark.parametrize("number", [TERM, slow(INT)])
async def test_a_stop_at_any_moment_of_a_start_ends_it_with_0(name: str, number: int, delay_s: float) -> None:
    command = COMMANDS[name] if name != "worker" else ["-m", "penstock", "worker", "--model", "demo"]
    async with running(*command, "--redis-url", "redis://127.0.0.1:1") as process:
        await eventually(lambda: catches(process.pid, TERM))
        os.kill(process.pid, HUP)  # it has nothing to reload
        await asyncio.sleep(delay_s)
        for _ in range(2):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        outcome = await finish(process)
    assert (outcome.status, "Traceback" in outcome.err) == (0, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process 1 of its own")
async def test_process_1_hears_a_stop_while_it_imports() -> None:
    command = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "penstock", "gateway", "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    await eventually(lambda: process.returncode is not None or bool(children(process.pid)))
    if process.returncode is not None:
        pytest.skip("no namespaces here")
    (child,) = children(process.pid)
    await eventually(lambda: catches(child, TERM))
    os.kill(child, TERM)
    assert (await finish(process)).status == 0


@pytest.mark.parametrize("name", ["worker", "gateway", "gateways"])
async def test_a_hang_up_reloads_and_a_stop_that_comes_twice_drains(
    name: str, redis: RedisClient, redis_url: str
) -> None:
    """The stop comes to the group, as from terminals and `timeout`, and to the process, which started with signals
    blocked.
    """
    async with running(*service(name, redis_url), is_blocked=True) as process:
        count = 2 if name == "gateways" else 1
        await until(process, READY[name], count)
        await reload(process, count)
        if name == "worker":
            await send(redis, prompt="x", id="r", max_tokens=10**6)
            await read_until(redis, "r", lambda entry: isinstance(entry, ChunkEntry))
        for _ in range(3):
            os.killpg(process.pid, TERM)
            os.kill(process.pid, INT)
        if name == "worker":
            await until(process, "draining")
            os.kill(process.pid, HUP)
            await redis.set(keys.cancel("q", "r"), 1)
        outcome = await finish(process)
    assert (outcome.status, "Traceback" in outcome.err) == (0, False)


@pytest.mark.parametrize("name", ["worker", "gateway"])
async def test_signals_at_each_function_from_the_first_stop_to_the_end_of_the_interpreter(
    name: str, redis: RedisClient, redis_url: str
) -> None:
    words = [*FAKE_WORKER[1:], "--drain-timeout-s", "0.2"] if name == "worker" else COMMANDS["gateway"][2:]
    command = [str(PROGRAMS / "signalled_service.py"), *words, "--redis-url", redis_url, "--log-format", "json"]
    async with running(*command) as process:
        await until(process, READY[name])
        if name == "worker":
            await send(redis, prompt="x", id="r", max_tokens=10**6)
            await read_until(redis, "r", lambda entry: isinstance(entry, ChunkEntry))
        os.kill(process.pid, TERM)
        outcome = await finish(process)
    assert (outcome.status, "Traceback" in outcome.err, "reloaded" in outcome.err) == (0, False, False), outcome.err
    if name == "worker":
        pending = await redis.xpending(keys.requests("q"), keys.GROUP)
        assert pending["consumers"] == [{"name": keys.WAITING, "pending": 1}]


async def reload(process: Any, count: int) -> None:
    """Sends SIGHUP until `count` processes have said that they reload: one that has just started has
    nothing to reload.
    """

    async def insist() -> None:
        while True:
            os.kill(process.pid, HUP)
            await asyncio.sleep(0.3)

    insisting = asyncio.create_task(insist())
    await until(process, "reloaded", count)
    insisting.cancel()


async def test_a_later_stop_aborts_several_processes_too(redis_url: str) -> None:
    async with running(*service("gateways", redis_url)) as process:
        await until(process, "process_started", 2)
        outcome = await finish_by(process, TERM)
    assert outcome.status in (0, 130)  # nothing was open, so the drain may have been done before


@pytest.mark.parametrize(
    ("name", "number"), [("gateway", HUP), slow("worker", HUP), slow("gateways", HUP), slow("gateway", INT)]
)
async def test_what_was_ignored_at_the_start_stays_ignored(name: str, number: signal.Signals, redis_url: str) -> None:
    async with running(*service(name, redis_url), ignored=number.name.removeprefix("SIG")) as process:
        await until(process, READY[name])
        for _ in range(3):
            os.kill(process.pid, number)
        os.kill(process.pid, TERM)
        outcome = await finish(process)
    assert (outcome.status, "reloaded" in outcome.err) == (0, False)


AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


@pytest.mark.parametrize("name", ["gateway", slow("worker"), slow("gateways")])
async def test_a_terminal_that_goes_drains(name: str, redis_url: str) -> None:
    ours, theirs = pty.openpty()
    command = ["-c", AT_TERMINAL, sys.executable, *service(name, redis_url)]
    async with running(*command, stdin=theirs) as process:
        os.close(theirs)
        await until(process, READY[name])
        await reload(process, 1)  # the terminal is still there
        os.close(ours)
        outcome = await finish(process)
    assert (outcome.status, "Traceback" in outcome.err) == (0, False)
