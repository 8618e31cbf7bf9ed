"""Runs commands of `penstock`, each in a fork of one process that has imported it, with the outputs that it is given.

A program: for each line of JSON on stdin (the fields of `Run`) it writes the command's exit status as a line. A fork
ends as any interpreter does, so what is flushed at the end counts too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.cli import main

CLOSED, GONE, FULL = "closed", "gone", "/dev/full"


@dataclass(frozen=True)
class Run:
    words: list[str]
    out: str  # CLOSED, GONE (a pipe without a reader), or a file
    err: str
    stacks: str  # a file: where the command is if it takes longer than `limit_s`
    limit_s: float
    encoding: str = "utf-8"
    variables: dict[str, str] = field(default_factory=dict)

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def begin(run: Run) -> None:
    """Does what the system and Python do before a program's first line."""
    faulthandler.dump_traceback_later(run.limit_s, file=Path(run.stacks).open("w"))  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name, to, errors in ((1, "stdout", run.out, "strict"), (2, "stderr", run.err, "backslashreplace")):
        _lead(number, to)
        is_open = to != CLOSED
        stream = open(number, "w", encoding=run.encoding, errors=errors, closefd=False) if is_open else None  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(run.variables)
    sys.argv = ["penstock", *run.words]


def _lead(number: int, to: str) -> None:
    if to == CLOSED:
        os.close(number)
    elif to == GONE:
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(writer)
        os.close(reader)
    else:
        file = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)  # unbuffered: a fork must not have what is for the next
    while line := commands.readline():
        child = os.fork()
        if child == 0:
            answers.close()
            begin(Run(**json.loads(line)))
            main()
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


if __name__ == "__main__":
    serve()
