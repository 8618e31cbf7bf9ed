"""Handles junk: a value that Penstock never wrote in one of its keys, by mistake or by a program with the same names.

A script or command that fails because of junk is run once more, within a script that finds the key (`guard.lua`). The
value is set aside, under another name in the same slot (`penstock:{QUEUE}:junk:NAME`). The command then continues as if
the key had not existed: indexes and counts are rebuilt. Nothing is deleted, and a command that succeeds costs nothing
more.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import structlog
from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.lua import load
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import JunkFound, is_junk
from penstock.protocol.redis.pipeline import Command, execute_one

_log = structlog.get_logger(__name__)

_GUARD = load("penstock.protocol.queue", "guard")
_IN_ITS_SLOT = re.compile(r"(penstock:(?:gateway:)?\{[^{}]+\}:)(.+)", re.DOTALL)
_PLAIN = "return redis.call(unpack(ARGV))"
_SCRIPTS = {"EVAL", "EVAL_RO"}
_WITH_SUBCOMMANDS = {"XGROUP", "XINFO"}

# The form of each string in a key, by the key's name. If a script fails over what it read, one string did not match.
_SHAPES = (
    (r":lanes:bands$", r"^%-?%d%d?%d?%d?$"),
    (r":lanes:tenant:", r"^[A-Z]%d+%-%d+/%d+/%d*$"),
    (r":lanes:aside:", r"^[A-Z]%d+%-%d+/%d+/%d*$"),
    (r":lanes:due$", r"^%d+%-%d+$"),
    (r":seen:", r"^%d+%-%d+$"),
    (r"^penstock:gateway:{[^}]+}:requests$", r"^%-?%d+$"),
    (r"^penstock:gateway:{[^}]+}:tokens$", r"^%-?%d+$"),
)


@dataclass(frozen=True, slots=True)
class Guard:
    """Says which keys a kind of process may set aside.

    Attributes:
        stays: names, within a queue or a slot, of keys that stay, because nobody can rebuild them; None: all.
        after: rebuilds the content of keys that were set aside, where that does not happen by itself.
    """

    stays: frozenset[str] | None = None
    after: Callable[[RedisClient, Sequence[str]], Awaitable[None]] | None = None

    async def execute_one(self, redis: RedisClient, command: Command) -> Any:
        """Runs `pipeline.execute_one`, setting junk aside.

        Raises:
            JunkFound: a key that stays holds junk.
            RedisError, OSError: as there.
        """
        try:
            return await execute_one(redis, command)
        except exceptions.ResponseError as error:
            return await self.mend(redis, command, error)

    async def mend(self, redis: RedisClient, command: Command, error: Exception) -> Any:
        """Runs `command` again after setting aside what was in its way, and returns the answer. It may have run in part
        before.

        Raises:
            JunkFound: a key that stays holds junk.
            RedisError, OSError: `error` if it is not about junk; else as `pipeline.execute_one`.
        """
        if isinstance(error, JunkFound) or not is_junk(error):
            raise error
        answer = await execute_one(redis, self._guarded(command))
        moved, in_the_way, result = answer
        pairs = list(zip(*[iter(map(_text, moved))] * 2, strict=True))
        for key, place in pairs:
            _log.warning("junk_set_aside", key=key, place=place)
        if pairs and self.after is not None:
            await self.after(redis, [key for key, _ in pairs])
        if in_the_way:
            raise JunkFound(_text(in_the_way)) from error
        return result

    def place_for(self, key: str) -> str | None:
        """Returns the key for setting aside a key's content; None: it stays, or belongs to a request, which ends with
        it.

        The same rule as in `guard.lua`.
        """
        if key == keys.queues():
            return None if self.stays is None else f"{{{key}}}:junk:all"
        found = _IN_ITS_SLOT.fullmatch(key)
        if found is None or self.stays is None or found[2] in self.stays or found[2].startswith("junk:"):
            return None
        return f"{found[1]}junk:{found[2]}"

    def _guarded(self, command: Command) -> Command:
        if command[0] in _SCRIPTS:
            return (command[0], _around(str(command[1]), self.stays), *command[2:])
        key = command[2 if command[0] in _WITH_SUBCOMMANDS else 1]
        return ("EVAL", _around(_PLAIN, self.stays), 1, key, *command)


@functools.cache
def _around(script: str, stays: frozenset[str] | None) -> str:
    names = "nil" if stays is None else "{" + ", ".join(f"['{name}'] = true" for name in sorted(stays)) + "}"
    shapes = ", ".join(f"'{each}'" for pair in _SHAPES for each in pair)
    head = f"local server_call, plain, STAYS, SHAPES, redis = redis.pcall, redis, {names}, {{{shapes}}}, {{}}\n"
    copy = "for name, value in pairs(plain) do redis[name] = value end\n"
    return f"{head}{copy}local function script()\n{script}\nend\n{_GUARD}"


def _text(name: Any) -> str:
    return unquote(name.decode() if isinstance(name, bytes) else name, errors="replace")
