"""Runs `penstock` as people do, in a process of its own, or its commands in this one."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

from penstock.cli import run
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of the tests without settings of Penstock, and with `variables`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_") and name != "REDIS_URL"
    }
    return {**kept, "COLUMNS": "120", "TERM": "dumb", **variables}


async def start(
    *arguments: str,
    code: str | None = None,
    cwd: Path | None = None,
    stderr: int = asyncio.subprocess.PIPE,
    **variables: str,
) -> asyncio.subprocess.Process:
    """Starts `penstock` with `arguments`; with `code`, Python code that calls `penstock.cli.main` itself."""
    program = ["-m", "penstock"] if code is None else ["-c", code]
    return await asyncio.create_subprocess_exec(
        sys.executable, *program, *arguments, env=environment(**variables), cwd=cwd or ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
    )  # fmt: skip


async def penstock(
    *arguments: str, stdin: str = "", code: str | None = None, cwd: Path | None = None, **variables: Any
) -> Outcome:
    """Runs `penstock` to its end."""
    return await finish(await start(*arguments, code=code, cwd=cwd, **variables), stdin)


def command(*arguments: str, **variables: str) -> Outcome:
    """Runs `penstock` in this process, to test what a command says. How a process starts and ends is not tested so."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        status = run(arguments)
    return Outcome(status, out.getvalue(), err.getvalue())


class Terminal:
    """A terminal that processes write to and read from (`device`)."""

    def __init__(self, rows: int = 0, columns: int = 0) -> None:
        self._ours, self.device = pty.openpty()
        if rows:
            fcntl.ioctl(self.device, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(self._ours, False)
        self._text = ""

    @property
    def text(self) -> str:
        """All that was written so far."""
        with suppress(BlockingIOError):
            self._text += os.read(self._ours, 1 << 20).decode(errors="replace")
        return self._text

    @property
    def screen(self) -> str:
        """Screen that a full-screen program drew last, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text.rpartition("\x1b[H")[2])

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._ours)
        os.close(self.device)


async def finish(process: asyncio.subprocess.Process, stdin: str = "") -> Outcome:
    """Waits for the end; a process that takes too long is killed and fails the test."""
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode() if process.stdin else None), WAIT_S)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(
            f"still running after {WAIT_S:g} s\n{(out or b'').decode()}\n{(err or b'').decode()}"
        ) from None
    assert process.returncode is not None
    return Outcome(process.returncode, (out or b"").decode(), (err or b"").decode())


async def finish_by(process: asyncio.subprocess.Process, number: int) -> Outcome:
    """Sends a signal again and again until it no longer counts as the first stop."""

    async def insist() -> None:
        while process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)  # `send_signal` looks whether it has ended, and takes its status away
            await asyncio.sleep(0.1)

    insisting = asyncio.create_task(insist())
    try:
        return await finish(process)
    finally:
        insisting.cancel()
