"""A command whose output can't be written, or has another encoding or width, says so in one line, without traceback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.local.embedded import EmbeddedServer
from tests.cli.cli_process import environment
from tests.cli.commands_in_forks import CLOSED, FULL, GONE, Run
from tests.cli.test_cli_values import LEAVES
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, slow
from tests.support.programs.worker_harness import running_worker

COMMANDS = {
    "send": ["send", "--queue", "q", "--plain", "x ü", "--max-tokens", "2"],
    "top": ["top", "--once", "--queue", "q"],
    "workers": ["workers", "--queue", "q"],
    "card": ["card", "--queue", "q"],
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    with EmbeddedServer() as server:
        async with running_worker(server.url, name="w0"):
            yield server.url


async def run(url: str, command: list[str], stdout: Any, closed: str = "", **variables: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "penstock", *command, "--redis-url", url]
    if closed:
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, err.decode()


@pytest.mark.parametrize("name", ["send", slow("top"), slow("workers"), slow("card")])
async def test_an_output_that_cannot_be_written(name: str, url: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reader, gone = os.pipe()
    os.close(reader)
    for stdout in (full, gone):
        status, err = await run(url, COMMANDS[name], stdout)
        assert (status, len(err.splitlines()) <= 1, "Traceback" in err) == (1, True, False), err
        os.close(stdout)
    status, err = await run(url, COMMANDS[name], subprocess.DEVNULL, closed=">&-")
    assert (status, "Traceback" in err) == (0, False)
    status, err = await run(url, COMMANDS[name], subprocess.DEVNULL, closed="2>/dev/full")
    assert status == 0


@pytest.mark.parametrize("name", ["send", "top", slow("workers"), slow("card")])
async def test_an_output_of_another_encoding_and_of_no_width(name: str, url: str) -> None:
    narrow = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "1"}
    assert await run(url, COMMANDS[name], subprocess.DEVNULL, **narrow) == (0, "")


ONE_OF_EACH = {
    **COMMANDS,
    "requests list": ["--queue", "q"], "requests show": ["x", "--queue", "q"], "requests cancel": ["--yes", "x"],
    "dead list": ["--queue", "q"], "dead show": ["x"], "dead replay": ["--all"], "dead purge": ["--all", "--yes"],
    "tenants list": ["--queue", "q"], "tenants weight": ["t", "2"], "drain": ["nobody"], "doctor": [],
    "keys create": ["--name", "k"], "keys list": [], "keys revoke": ["x"], "explain": ["x", "--queue", "q"],
    "chat": ["--queue", "q"],
}  # fmt: skip
REFUSED = {
    "worker": ["--max-num-seqs", "0"], "gateway": ["--port", "x"], "demo": ["--max-tokens", "0"],
    "chaos": ["--requests", "0"], "plan": ["--topology", "x"], "bench engine": ["--requests", "0"],
    "bench serve": ["--requests", "0"], "bench compare": ["/no/file", "/no/file"], "version": [],
    "serve": ["--workers", "0"], "map": ["/no/file", "/no/file.jsonl"], "pull": ["--list"],
}  # fmt: skip
"""Services, commands that start some, and commands that take no `--redis-url`."""


def test_all_commands_are_listed() -> None:
    """A new command must say here how it is tried."""
    assert {" ".join(path) for path in LEAVES} == ONE_OF_EACH.keys() | REFUSED.keys()


class Forks:
    """Runs commands in processes that need no start of Python."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, folder: Path) -> None:
        self._process = process
        self._url = url
        self._folder = folder

    async def run(self, words: list[str], out: str, err: str, encoding: str = "utf-8", **variables: str) -> Ended:
        """Runs a command; `out` and `err` are those of `Run`, or a file if empty."""
        files = [self._folder / "out", self._folder / "err"]
        for file in files:
            file.write_text("")
        stacks, outputs = self._folder / "stacks", (out or str(files[0]), err or str(files[1]))
        run = Run(words, *outputs, str(stacks), 0.8 * WAIT_S, encoding, environment(**variables))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(run.line())
        try:
            status = int(await asyncio.wait_for(self._process.stdout.readline(), WAIT_S))
        except TimeoutError as error:
            error.add_note(f"{run}\n{stacks.read_text()}")
            raise
        return Ended(status, *(file.read_text(errors="replace") for file in files))

    def words(self, name: str) -> list[str]:
        if name in REFUSED:
            return [*name.split(), *REFUSED[name]]
        given = ONE_OF_EACH[name]
        return [*(given if name in COMMANDS else [*name.split(), *given]), "--redis-url", self._url]


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
async def forks(url: str, tmp_path: Path) -> AsyncIterator[Forks]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "tests/cli/commands_in_forks.py"), cwd=ROOT, env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Forks(process, url, tmp_path)
    finally:
        process.kill()
        await process.wait()


async def test_a_mistake_that_cannot_be_said_is_one_all_the_same(forks: Forks) -> None:
    for path in LEAVES:
        ended = await forks.run([*path, "--no-such"], "", FULL)
        assert ended == (2, "", ""), path


async def test_no_command_ends_in_a_traceback_where_its_output_is_full(forks: Forks) -> None:
    for name in ONE_OF_EACH | REFUSED:
        check(name, await forks.run(forks.words(name), FULL, ""))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["as it is meant", "--help", "--no-such"])
async def test_nor_into_any_other_output(words: str, forks: Forks) -> None:
    for name in ONE_OF_EACH | REFUSED:
        given = [*name.split(), words] if words.startswith("-") else forks.words(name)
        meant = await forks.run(given, "", "")
        for out, err in ((FULL, ""), (GONE, ""), (CLOSED, ""), ("", FULL), ("", GONE), ("", CLOSED), (FULL, FULL)):
            ended = await forks.run(given, out, err)
            lost = meant.out and out in (FULL, GONE)
            assert ended.status == (meant.status or bool(lost)), (given, out, err, ended)
            check(name, ended)
        for width in ("10", "1", "0"):
            ended = await forks.run(given, "", "", "ascii", COLUMNS=width, LC_ALL="C", PYTHONIOENCODING="ascii")
            assert ended.status == meant.status, (given, width, ended)
            assert "Traceback" not in ended.err


def check(name: str, ended: Ended) -> None:
    """Checks that the status is one of the table's, with at most one line on stderr unless the usage was wrong."""
    assert ended.status in range(9), (name, ended)
    assert len(ended.err.splitlines()) <= 1 or ended.err.startswith("Usage:"), (name, ended)
    assert "Traceback" not in ended.err, (name, ended)
