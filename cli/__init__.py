"""The `penstock` command. This file alone turns errors into exit statuses.

| status | meaning |
| --- | --- |
| 0 | done; for `worker` and `gateway`: drained |
| 1 | failed: the message on stderr says why |
| 2 | wrong usage or settings |
| 3 to 8 | `worker` could not start or go on: `worker/errors.py` lists the reasons |
| 130 | interrupted; for `worker` and `gateway`: told to stop twice |
| 134, 135, 136, 139 | a crash, by SIGABRT, SIGBUS, SIGFPE or SIGSEGV: docs/troubleshooting.md |
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import typer

from penstock import stopping
from penstock.cli import (
    card,
    chaos,
    chat,
    dead,
    demo,
    doctor,
    drain,
    explain,
    gateway,
    keys,
    plan,
    pull,
    requests,
    send,
    serve,
    tenants,
    top,
    version,
    worker,
    workers,
)
from penstock.cli import map as map_command
from penstock.cli.bench import commands as bench
from penstock.cli.shared.errors import exit_status_of
from penstock.cli.shared.values import strict
from penstock.installed import refuse_shadowed

_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write to a file, a pipe or a terminal."""

app = typer.Typer(
    name="penstock",
    help="Serve a language model from a Redis queue: requests come in on a stream, tokens go out on another.",
    epilog="Settings are flags, PENSTOCK_* variables or lines of penstock.toml, in this order of precedence.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for command in (
    serve.serve,
    worker.worker,
    gateway.gateway,
    chat.chat,
    send.send,
    workers.workers,
    top.top,
    card.card,
    drain.drain,
    explain.explain,
    demo.demo,
    chaos.chaos,
    plan.plan,
    pull.pull,
    doctor.doctor,
    version.version,
):
    app.command()(command)
app.command("map")(map_command.map_rows)
app.add_typer(bench.app)
app.add_typer(dead.dead)
app.add_typer(keys.keys)
app.add_typer(requests.requests)
app.add_typer(tenants.tenants)


@app.callback()
def _options(version: version.VersionOption = False) -> None:
    """Takes the options of `penstock` itself, which act by themselves."""


def main() -> None:
    """Runs the command line and exits."""
    _open_standard_streams()
    try:
        refuse_shadowed()  # `penstock/__init__.py` may be another's
    except ImportError as error:
        _say(str(error))
        sys.exit(1)
    stopping.listen_early(("penstock", *sys.argv[1:]))  # if a program of another name calls this
    need_no_affinity()
    status = run()
    stopping.end()
    try:
        sys.stdout.flush()
    except OSError as error:
        if not status:
            _say(f"the output can't be written: {error}")
        os._exit(status or 1)  # or the interpreter would try again, and print a traceback
    try:
        sys.stderr.flush()
    except BlockingIOError:  # nobody reads the log's pipe
        pass
    except OSError:
        os._exit(status)  # only log lines are lost, no result
    if any(thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate()):
        # A worker told to stop while it loads leaves a thread inside the compiler. That thread would crash if the
        # interpreter were shut down around it.
        os._exit(status)
    sys.exit(status)


def need_no_affinity() -> None:
    """Lets asyncio make threads where a sandbox refuses to tell the CPU affinity: from Python 3.13 on it asks first."""
    if sys.version_info >= (3, 13):
        count = os.process_cpu_count

        def count_anyway() -> int | None:
            try:
                return count()
            except OSError:
                return os.cpu_count()

        os.process_cpu_count = count_anyway


def _open_standard_streams() -> None:
    """Opens closed standard streams on /dev/null, or a connection that got their number would receive their output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, this process's own by default, and returns its exit status."""
    try:
        strict(typer.main.get_command(app))(arguments, prog_name="penstock")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Rich ends like this when its reader is gone
            return _status_behind(end.__context__)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        status = exit_status_of(error)
        if status is None and isinstance(error, OSError) and error.errno in _OUTPUT and error.filename is None:
            _say(f"the output can't be written: {error}")
            return _status_behind(error)
        if status is None:
            raise
        _say(str(error))
        return status
    return 0


def _status_behind(error: OSError) -> int:
    """Returns the status of the error whose message could not be written; 1 if there was none."""
    status = getattr(error.__context__, "exit_code", 1)
    return status if isinstance(status, int) else 1


def _say(message: str) -> None:
    """Writes one line, even with foreign text in it."""
    message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    with suppress(OSError):  # nowhere to write to; the exit status tells it
        sys.stderr.write(f"penstock: {message}\n")
