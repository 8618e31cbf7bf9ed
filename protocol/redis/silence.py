"""Detects connections that die silently because a load balancer or NAT on the way has dropped them without notice.

A caller that waits for an answer over such a connection would wait until its time limit, and the next caller over the
next connection. So when an answer is overdue, a new connection is made, and the server is asked over it. A server
serves its connections in turn. If the new connection has its answer, and the old one still has none a while later, the
old one is dead. It is closed, together with all connections of the process that were silent for as long. A server that
is slow, busy or away answers the new connection as late as the old one, or not at all: then nothing is closed.

The kernel watches too, where it can (`tune`): it finds dead connections that nobody waits over, and keeps routers from
dropping others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import struct
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from fcntl import ioctl
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from redis import exceptions
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.protocol.redis.faults import is_not_permitted
from penstock.protocol.redis.moves import Parser

_log = logging.getLogger(__name__)

ANSWER_S = 2.5  # after which an answer is overdue
LATE_S = 1.5  # how long after its end a blocking read's answer is overdue
GRACE_S = 0.75  # left to the old connections once a new one was answered; longer if that answer took longer
ASK_TIMEOUT_S = 3.0
ASK_EVERY_S = 1.0  # between two tries, while new connections get no answer either
MAX_IDLE_S = 30.0  # a connection unused for longer is replaced
MOST_PATIENT = 4.0  # times the above: then the time limits of commands are over
PATIENT_FOR_S = 5.0  # times how patient

_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
"""Socket options, by their names in Python. The last one is Linux's, in milliseconds; TCP_KEEPALIVE is macOS's."""

_block_s: ContextVar[float] = ContextVar("_block_s", default=0.0)


@contextmanager
def blocking(block_s: float) -> Iterator[None]:
    """Lets the server take `block_s` to answer the commands in the block."""
    token = _block_s.set(block_s)
    try:
        yield
    finally:
        _block_s.reset(token)


def tune(connected: socket.socket) -> None:
    """Makes the kernel probe the other end after 5 s without a packet, and give up after 10 s.

    Options that a platform or a sandbox lacks are left out.
    """
    with suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        with suppress(OSError, AttributeError):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class AnswerWait:
    """State of a connection's wait for an answer.

    Attributes:
        since_s: since when nothing has been sent or received; None: no answer is due.
        limit_s: how long that may last.
        heard_s: when something was last received (monotonic, like all times here).
    """

    __slots__ = ("block_s", "heard_s", "limit_s", "since_s", "watch")

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.since_s: float | None = None
        self.heard_s = 0.0
        self.watch: SilenceWatch | None = None
        self.limit_s = 0.0

    def begin(self) -> None:
        self.since_s = time.monotonic()
        block_s = max(self.block_s, _block_s.get())
        self.limit_s = block_s + LATE_S if block_s else ANSWER_S
        if self.watch is not None:
            self.watch.expect(self.since_s + self.limit_s)

    def due_s(self, patience: float) -> float:
        """Returns when the answer becomes overdue."""
        return math.inf if self.since_s is None else self.since_s + self.limit_s * patience


class _Parser(Parser):
    """Notes when an answer is due, and when any part of one arrives."""

    def __init__(self, wait: AnswerWait, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._wait = wait

    async def read_from_socket(self) -> bool:
        wait = self._wait
        wait.begin()
        try:
            await super().read_from_socket()
            wait.heard_s = time.monotonic()
        except TimeoutError as error:  # the kernel's; the library would take it for its caller's and answer None
            raise exceptions.ConnectionError(str(error)) from error
        finally:
            wait.since_s = None
        return True


class Watched(Connection):
    """A connection that is closed when found dead, and made anew when it has not been used for long.

    Args:
        deployment: what it leads to: all connections to it are watched together.
        block_s: how long the server may leave a command unanswered.
        max_idle_s: how long it may be idle.
    """

    def __init__(self, *, deployment: str, block_s: float = 0.0, max_idle_s: float = MAX_IDLE_S, **kwargs: Any) -> None:
        self._made_with = {"deployment": deployment, **kwargs}
        self._deployment = deployment
        self._max_idle_s = max_idle_s
        self.wait = AnswerWait(block_s)
        self.made_s = 0.0
        super().__init__(**{**kwargs, "parser_class": partial(_Parser, self.wait), "socket_keepalive_options": {}})

    @property
    def place(self) -> tuple[str, int]:
        """The server that it leads to, among those of the deployment."""
        return self.host, self.port

    async def connect(self) -> None:
        if self.is_connected and self.should_reconnect():
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]
        if self._writer is not None:
            tune(self._writer.get_extra_info("socket"))
        self.made_s = self.wait.heard_s = time.monotonic()
        self.wait.watch = SilenceWatch.of(self._deployment)
        self.wait.watch.add(self)

    def should_reconnect(self) -> bool:
        return bool(super().should_reconnect()) or self._is_stale  # type: ignore[no-untyped-call]

    @property
    def _is_stale(self) -> bool:
        """Whether it was idle for too long, or was closed meanwhile, which only a reader would notice."""
        if self._reader is None or self._writer is None or self.wait.since_s is not None:
            return False
        is_ended = self._reader.at_eof() or self._writer.transport.is_closing()
        return is_ended or time.monotonic() - self.wait.heard_s > self._max_idle_s

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if self.is_connected:
            self.wait.begin()
        try:
            await super().send_packed_command(command, check_health)
        finally:
            self.wait.since_s = None

    async def disconnect(self, nowait: bool = False, *args: Any, **kwargs: Any) -> None:
        if nowait and self._writer is not None:
            self._writer.transport.abort()  # unsent data would keep it open for as long as nobody reads
        await super().disconnect(nowait, *args, **kwargs)

    def close_dead(self, why: str) -> None:
        """Closes a dead connection. Callers that wait over it get an error."""
        if self._reader is not None and self._writer is not None:
            self.wait.since_s = None
            self.mark_for_reconnect()  # type: ignore[no-untyped-call]
            self._reader.set_exception(exceptions.ConnectionError(why))
            self._writer.transport.abort()

    def unsent(self) -> int:
        """Returns the number of bytes that have not reached the other end, as far as known."""
        if self._writer is None:
            return 0
        transport = self._writer.transport
        in_kernel = 0
        with suppress(OSError, ValueError):  # not every platform says
            descriptor = transport.get_extra_info("socket").fileno()
            (in_kernel,) = struct.unpack("i", ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return transport.get_write_buffer_size() + in_kernel

    async def ask_anew(self) -> float | None:
        """Makes another connection like this one, for nobody else. Returns the seconds until its answer; None: no
        answer.
        """
        plain = {"redis_connect_func": None, "retry": Retry(NoBackoff(), 0)}
        other = type(self)(**{**self._made_with, **plain})
        asked_s = time.monotonic()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await other.connect()
                asked_s = time.monotonic()
                await other.send_command("PING", check_health=False)
                await other.read_response()
        except Exception as error:  # whatever it is, it is not an answer
            if not (is_not_permitted(error) and other.is_connected):
                return None
        finally:
            await other.disconnect(nowait=True)
        return time.monotonic() - asked_s


class SilenceWatch:
    """Watches all connections of one event loop to one deployment. It does nothing while no answer is overdue.

    A server may keep one client waiting without delaying the others: `CLIENT PAUSE WRITE`, or a proxy with many servers
    behind it. So after closing a connection, the watch is more patient for a while with connections made since. Older
    ones may have died with that one. After an answer that was only late, it is more patient with all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connections: WeakSet[Watched] = WeakSet()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when the timer is due
        self._task: asyncio.Task[None] | None = None
        self._patience = self._patience_with_old = 1.0
        self._new_since_s = math.inf  # connections made later count as new
        self._learnt_s = self._closed_s = -math.inf

    @classmethod
    def of(cls, deployment: str) -> SilenceWatch:
        loop = asyncio.get_running_loop()
        key = (id(loop), deployment)
        watch = _watches.get(key)
        if watch is None or watch.loop is not loop:
            watch = _watches[key] = cls(loop)
        return watch

    def add(self, connection: Watched) -> None:
        self._connections.add(connection)

    def expect(self, due_s: float) -> None:
        """Notes that a caller waits whose answer is overdue from `due_s` on."""
        if due_s < self._due_s and self._task is None:
            self._due_s = due_s
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(due_s - time.monotonic(), self._look)

    def _look(self) -> None:
        self._timer, self._due_s = None, math.inf
        self._forget()
        due_s = min(map(self._late_s, self._connections), default=math.inf)
        if due_s <= time.monotonic():
            self._task = self.loop.create_task(self._ask(), name="penstock-silence")
            self._task.add_done_callback(self._asked)
        elif due_s < math.inf:
            self.expect(due_s)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            self._look()

    async def _ask(self) -> None:
        while late := [each for each in self._connections if self._late_s(each) <= time.monotonic()]:
            if not await self._judge(late):
                await asyncio.sleep(ASK_EVERY_S * random.uniform(0.75, 1.25))

    async def _judge(self, late: list[Watched]) -> bool:
        """Asks over new connections and closes dead ones. Returns whether all were answered: then none of `late` is
        late any more.
        """
        asked_s = time.monotonic()
        before = [(each, each.wait.since_s or 0.0, each.wait.limit_s, each.unsent()) for each in late]
        places = {each.place: each for each in late}
        took = dict(zip(places, await asyncio.gather(*(each.ask_anew() for each in places.values())), strict=True))
        answers = [each for each in took.values() if each is not None]
        if not answers:
            return False
        slice_s = max(GRACE_S, *answers) / 4  # in slices, so that data which came while this process was busy is read
        for _ in range(4):
            await asyncio.sleep(slice_s)
        dead = []
        for each, since_s, limit_s, unsent in before:
            if each.wait.since_s != since_s:
                self._learn(1.25 * (each.wait.heard_s - since_s) / limit_s, of_all=True)
            elif each.unsent() != unsent:
                each.wait.since_s = time.monotonic()
            elif took[each.place] is not None:
                dead.append(each)
        if dead:
            self._close(dead, asked_s, max(answers))
        return all(answer is not None for answer in took.values())

    def _close(self, dead: list[Watched], asked_s: float, took_s: float) -> None:
        """Closes these, and those equally silent since the new one was asked: idle ones, and those that wait for a
        server that answers. Data received before that may predate the death, as a blocking read waits for long.
        """
        silent_s = time.monotonic() - min(each.wait.since_s or math.inf for each in dead)
        places = {each.place for each in dead}
        silent = [
            each
            for each in self._connections
            if each.is_connected
            and each.wait.heard_s < asked_s
            and (each.wait.since_s is None or (each.wait.since_s < asked_s and each.place in places))
        ]
        why = f"dead: silent for {silent_s:.1f} s, while a new connection was answered within {took_s:.3f} s"
        _log.warning("%d connections to Redis were %s", len(silent), why)
        for each in silent:
            each.close_dead(f"the connection was {why}")
        if self._patience == 1.0 or any(each.made_s > self._closed_s for each in dead):  # not for the same death again
            self._learn(2 * self._patience, of_all=False)
        self._closed_s = time.monotonic()

    def _late_s(self, connection: Watched) -> float:
        """Returns when the wait over `connection` becomes overdue."""
        is_new = connection.made_s > self._new_since_s
        return connection.wait.due_s(self._patience if is_new else self._patience_with_old)

    def _learn(self, patience: float, *, of_all: bool) -> None:
        if patience <= 1.0:
            return
        self._learnt_s = time.monotonic()
        self._new_since_s = min(self._new_since_s, self._learnt_s)
        self._patience = min(MOST_PATIENT, max(self._patience, patience))
        if of_all:
            self._patience_with_old = min(MOST_PATIENT, max(self._patience_with_old, patience))

    def _forget(self) -> None:
        if time.monotonic() - self._learnt_s > PATIENT_FOR_S * self._patience:
            self._patience = self._patience_with_old = 1.0
            self._new_since_s = math.inf


_watches: WeakValueDictionary[tuple[int, str], SilenceWatch] = WeakValueDictionary()
