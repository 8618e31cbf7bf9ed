"""Loads Lua scripts, files in a folder `lua` of the package that calls them, and turns calls into plain commands.

A script's keys share one hash slot, and running it twice is the same as running it once: the Redis library repeats a
command whose answer was lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

from penstock.protocol.redis.pipeline import Command

_SHARED = "shared/"
_LOADED_AFTER = re.compile(r"^-- Loaded after (.+)\.$", re.MULTILINE)
_PART = re.compile(r"([\w/]+)\.lua")


def load(package: str, name: str) -> str:
    """Reads a script: the file `lua/<name>.lua` of `package`, after the files whose code it uses.

    A line in the head of a file names these: `-- Loaded after lanes/accounts.lua and shared/clock.lua.` Each of them
    comes once, after those that it names itself. A name under `shared/` is a file in `scripts/lua/` of the protocol,
    which every package may use.
    """
    parts: dict[str, str] = {}
    _add(name, files(package) / "lua", parts)
    return "\n".join(parts.values())


def _add(name: str, own: Traversable, parts: dict[str, str]) -> None:
    if name in parts:
        return
    folder = files(__package__) / "scripts" / "lua" if name.startswith(_SHARED) else own
    text = (folder / f"{name}.lua").read_text("utf-8")
    for line in _LOADED_AFTER.findall(text):
        for needed in _PART.findall(line):
            _add(needed, own, parts)
    parts[name] = text


def call(
    script: str, key_names: Sequence[str | bytes], arguments: Iterable[str | bytes | int], *, only_reads: bool = False
) -> Command:
    """Returns the command that runs `script`. It holds the whole source; `pipeline.execute` sends only its hash if that
    will do.

    With `only_reads` it needs no permission to write to its keys. Any other script does, whatever it does to them.
    """
    return ("EVAL_RO" if only_reads else "EVAL", script, len(key_names), *key_names, *arguments)
