"""A proxy in front of Redis that speaks its protocol, and answers in the server's place or holds answers back.

It knows every command by its name, and a script by its name in the code. So a test can ask which ones were sent and
which were refused.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from hiredis import Reader, pack_command

from penstock.protocol.redis.pipeline import script_hash
from tests.support.redis_servers.forwarding import Forwarding, until_one_ends

Command: TypeAlias = list[bytes]

PASSING = {
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
    "MISCONF": "MISCONF Errors writing to the AOF file: No space left on device",
    "BUSY": "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY": "READONLY You can't write against a read only replica.",
    "LOADING": "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN": "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN": "CLUSTERDOWN The cluster is down",
    "TRYAGAIN": "TRYAGAIN Multiple keys request during rehashing of slot",
}
"""Answers that a server gives for a while, by code."""

FULL = "ERR max number of clients reached"
"""Answer to a new connection before it is closed."""

REFUSED = {
    "NOPERM": "NOPERM User default has no permissions to run this command",
    "WRONGPASS": "WRONGPASS invalid username-password pair or user is disabled.",
    "NOAUTH": "NOAUTH Authentication required.",
    "script": "ERR ACL failure in script: User default has no permissions to run the 'set' command",
}
"""Answers that last until somebody changes what the user may do."""

_GROUPS = ("XGROUP", "XINFO", "CLIENT", "CONFIG", "CLUSTER", "SCRIPT", "ACL", "COMMAND", "OBJECT", "MEMORY")
_GREETING = ("AUTH", "HELLO", "SELECT", "CLIENT SETNAME", "CLIENT SETINFO", "PING")


class RefusingProxy(Forwarding):
    """Forwards to the server behind `url`, one command of a connection at a time.

    Args:
        url: URL of the server.
        tls: TLS context for clients; None: no TLS.

    Attributes:
        seen: number of times each command came, by name.
        refused: number of times each command was answered here, by name.
        greeting: what new connections are told before they are closed; None: they are accepted.
        on_command: called with the name of each command before it is forwarded.
        is_answering: while it is not set, no answer goes back; commands that came before are executed.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 6379, tls)
        self._writers: set[asyncio.StreamWriter] = set()
        self._answer = b""
        self._matches: Callable[[str], bool] = _is_work
        self._turns: list[bytes] = []
        self._num_deaths = 0
        self._reads_on = True
        self._held = ""
        self.seen: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.greeting: str | None = None
        self.on_command: Callable[[str], object] = str
        self.is_answering = asyncio.Event()
        self.is_answering.set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def refuse(self, answer: str, *names: str) -> None:
        """Refuses commands of these names with this error from now on; without names, all but those that greet a
        server.
        """
        self._answer, self._turns = f"-{answer}\r\n".encode(), []
        self._matches = names.__contains__ if names else _is_work

    def refuse_in_turn(self, answers: Iterable[str], *names: str) -> None:
        """Refuses each command, by name, with these errors one after the other; then it passes."""
        self._matches = names.__contains__ if names else _is_work
        self._turns = [f"-{answer}\r\n".encode() for answer in answers]

    def allow(self) -> None:
        """Ends the refusals and the greeting."""
        self._answer, self._turns, self.greeting = b"", [], None

    def forget(self, *, reads_on: bool = True) -> None:
        """Lets existing connections die silently, as a load balancer does that has lost its table.

        What comes over them goes nowhere; neither end hears of that, or that the other one closes. New connections
        work. With `reads_on` False nothing is read from them either.
        """
        self._num_deaths += 1
        self._reads_on = reads_on

    def hold(self, name: str) -> None:
        """Withholds the answers to commands of this name from now on; others are answered, over the same connections
        too.
        """
        self._held = name

    def half_close(self) -> None:
        """Ends the stream to the clients on all existing connections; what they send is still read."""
        for writer in self._writers:
            writer.write_eof()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.greeting is not None:
            writer.write(f"-{self.greeting}\r\n".encode())
            writer.close()
            return
        await super()._connect(reader, writer)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        link = Link(self, self._num_deaths)
        commands: asyncio.Queue[Command] = asyncio.Queue()
        self._writers.add(writer)
        try:
            await until_one_ends(
                _read_commands(reader, commands, link),
                self._answer_all(commands, writer, server_reader, server, link),
            )
            if link.is_dead:
                await asyncio.Event().wait()
        finally:
            self._writers.discard(writer)

    async def _answer_all(
        self,
        commands: asyncio.Queue[Command],
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        link: Link,
    ) -> None:
        while True:
            command = await commands.get()
            if link.is_dead:
                continue
            name = name_of(command)
            self.seen[name] += 1
            self.on_command(name)
            refusal = self._refusal_of(name)
            if refusal:
                self.refused[name] += 1
                answer = refusal
            else:
                server.write(packed(command))
                answer = await read_answer(server_reader)
            await self.is_answering.wait()
            if link.is_dead or name == self._held:
                continue
            writer.write(answer)
            await writer.drain()

    def _refusal_of(self, name: str) -> bytes:
        if not self._matches(name):
            return b""
        turn = self.refused[name]
        return self._turns[turn] if turn < len(self._turns) else self._answer


@dataclass(frozen=True)
class Link:
    """A connection, which is dead once there were more deaths than when it was made."""

    proxy: RefusingProxy
    num_deaths: int

    @property
    def is_dead(self) -> bool:
        return self.num_deaths < self.proxy._num_deaths

    @property
    def is_read(self) -> bool:
        return self.proxy._reads_on or not self.is_dead


async def _read_commands(reader: asyncio.StreamReader, commands: asyncio.Queue[Command], link: Link) -> None:
    parser = Reader()
    while link.is_read and (data := await reader.read(1 << 16)):
        parser.feed(data)
        while (command := parser.gets()) is not False:
            commands.put_nowait(command)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Reads the bytes of one answer: nothing follows it, as one command is under way at a time."""
    parser, parts = Reader(), []
    while data := await reader.read(1 << 16):
        parser.feed(data)
        parts.append(data)
        if parser.gets() is not False:
            return b"".join(parts)
    raise ConnectionResetError


def packed(command: Command) -> bytes:
    return bytes(pack_command(tuple(command)))  # type: ignore[arg-type]  # its stub allows one part


def name_of(command: Command) -> str:
    """Names a command by its first words, as `XGROUP CREATE`, and a script by module and name in the code:
    `claims.CLAIM`.
    """
    words = [word.decode(errors="replace").upper() for word in command[:2]]
    if words[0] in ("EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"):
        text = command[1].decode()
        digest = text if words[0].startswith("EVALSHA") else script_hash(text)
        return script_names().get(digest, f"script {digest}")
    return " ".join(words) if words[0] in _GROUPS and len(words) > 1 else words[0]


_CALLS = re.compile(r"redis\.[a-z_]+\(")
_names: dict[str, str] = {}
_num_modules = 0


def script_names() -> dict[str, str]:
    """Returns the names of all scripts of the loaded modules, by hash."""
    global _num_modules  # noqa: PLW0603
    if len(sys.modules) != _num_modules:
        _num_modules = len(sys.modules)
        _names.update(_scripts())
    return _names


def _scripts() -> Iterator[tuple[str, str]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("penstock."):
            for name, value in list(vars(module).items()):
                if isinstance(value, str) and not name.startswith("__") and _CALLS.search(value):
                    yield script_hash(value), f"{module_name.rpartition('.')[2]}.{name.lstrip('_')}"


def _is_work(name: str) -> bool:
    return name not in _GREETING
