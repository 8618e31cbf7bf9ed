"""Loads Lua scripts, files in a folder `lua` of the package that calls them, and turns calls into plain commands.

A script's keys share one hash slot, and running it twice is the same as running it once: the Redis library repeats a
command whose answer was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from penstock.protocol.redis.pipeline import Command


def load(package: str, *names: str) -> str:
    """Reads a script: the files `lua/<name>.lua` of `package`, one after the other.

    Code that several scripts share has its own file, which is named before theirs.
    """
    folder = files(package) / "lua"
    return "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)


def call(
    script: str, key_names: Sequence[str | bytes], arguments: Iterable[str | bytes | int], *, only_reads: bool = False
) -> Command:
    """Returns the command that runs `script`. It holds the whole source; `pipeline.execute` sends only its hash if that
    will do.

    With `only_reads` it needs no permission to write to its keys. Any other script does, whatever it does to them.
    """
    return ("EVAL_RO" if only_reads else "EVAL", script, len(key_names), *key_names, *arguments)
