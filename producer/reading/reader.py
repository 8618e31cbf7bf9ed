"""Reads all replies of a client over one blocking connection (under Redis Cluster, one per hash slot in use)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from redis import exceptions

from penstock.producer.reading.entries import Position, decode_fields, entry_id, position
from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, PenstockError, ReplyCorrupt, ReplyGone, ServerRefused
from penstock.protocol.ids import new_id, slot_of
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import Fields, RedisClient, as_ours, connect_blocking
from penstock.protocol.redis.faults import UNREACHABLE, Dropped, is_junk, is_refused, may_pass
from penstock.protocol.redis.moves import BLOCK_S, Witness
from penstock.protocol.redis.pipeline import Batcher
from penstock.protocol.redis.streams import read_streams
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import ReplyEntry

log = logging.getLogger(__name__)

ENDED = ("done", "dead")
"""Values of `status` in a request's state once its reply has ended."""

LATE_S = 0.5  # after which an overdue blocked read is woken: the server's clock was set back
GONE_CHECK_S = 15.0
WAKE_TTL_S = 60
WAKE_RETRY_S = 0.05
ENTRIES_PER_READ = 256
MAX_ARRIVED = 256
MAX_BACKOFF_S = 1.0
CLOSE_TIMEOUT_S = 1.0


Hear: TypeAlias = Callable[[int, Exception | None], object]


class ReplyReader:
    """Follows any number of replies; each `Subscription` gets its own entries from its own position.

    One XREAD over all followed streams blocks at the server. When a stream joins the set meanwhile, the client appends
    to its own wake-up stream, which the XREAD reads as well. The XREAD then returns at once and is repeated with the
    longer list. An XREAD without a group changes nothing on the server, so it may be lost, repeated or abandoned.

    When the connection fails, reading resumes after the last entry seen of each stream, with jittered backoff. Waiting
    subscriptions fail, with `ConnectionLost`, only when Redis stayed away for `give_up_after_s`.

    A subscription that lets `MAX_ARRIVED` entries wait is paused until half of them are taken: what a slow reader
    leaves stays in Redis.

    Attributes:
        hear: gets the hash slot (0 without a cluster) and each error of an outage, and None once it is over.
    """

    def __init__(self, address: Address, commands: RedisClient, batcher: Batcher, *, give_up_after_s: float) -> None:
        self._address = address
        self._commands = commands
        self._batcher = batcher
        self._give_up_after_s = give_up_after_s
        self.redis = connect_blocking(address, decode=False, block_s=BLOCK_S, name="penstock-reader")
        self._lines: dict[int, _Line] = {}
        self.hear: Hear = _OutageLog(address)

    def follow(self, queue: str, request_id: str, after: str = "0-0") -> Subscription:
        """Starts reading the reply from the entry that follows `after`. Needs a running event loop."""
        slot = slot_of(request_id) if self._address.kind == "cluster" else 0
        line = self._lines.get(slot)
        if line is None:
            wake_key = keys.wake(new_id(slot if self._address.kind == "cluster" else None))
            line = _Line(
                self._address,
                self.redis,
                self._commands,
                self._batcher,
                wake_key,
                self._give_up_after_s,
                hear=lambda error: self.hear(slot, error),
            )
            self._lines[slot] = line
        subscription = Subscription(line, queue, request_id, position(after))
        line.add(subscription)
        return subscription

    async def close(self) -> None:
        """Stops reading; subscriptions that wait fail with ConnectionLost."""
        for line in self._lines.values():
            await line.close()
        self._lines.clear()
        await self.redis.aclose()


class Subscription:
    """The entries of one reply, each once and in order."""

    def __init__(self, line: _Line, queue: str, request_id: str, cursor: Position) -> None:
        self.request_id = request_id
        self.key = keys.reply(queue, request_id)
        self.state_key = keys.state(queue, request_id)
        self.seen_key = keys.seen(queue, request_id)
        self.cursor = cursor
        self.furthest = cursor
        self.quiet_since = time.monotonic()
        self.rewound_at: float | None = None
        self._last: Fields | None = None
        self._line = line
        self._arrived: deque[tuple[Position, Fields] | PenstockError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    async def next(self) -> tuple[str, ReplyEntry]:
        """Waits for the next entry and its id. Cancelling the wait loses nothing. One task at a time may wait.

        Raises:
            ReplyGone: the reply expired before it was read to its end.
            ReplyCorrupt: the entry does not follow the schema.
            ConnectionLost: Redis stayed away for too long, or the client was closed.
            ServerRefused: Redis does not let this client read the reply.
        """
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._arrived.popleft()
        if self._is_paused and len(self._arrived) <= MAX_ARRIVED // 2:
            self._is_paused = False
            self._line.resume(self)
        if isinstance(item, PenstockError):
            raise item
        return entry_id(item[0]), decode_fields(self.request_id, item[1])

    @property
    def has_chunk(self) -> bool:
        """Whether the next entry is there and is a chunk."""
        return bool(self._arrived) and isinstance(item := self._arrived[0], tuple) and item[1].get(b"type") == b"chunk"

    @property
    def is_lost(self) -> bool:
        """Whether there is no entry and none to come, because Redis stayed away or refused for too long."""
        return bool(self._arrived) and isinstance(error := self._arrived[0], PenstockError) and may_pass(error)

    def close(self) -> None:
        """Stops following. Harmless when repeated."""
        self._line.remove(self)

    def deliver(self, where: Position, fields: Fields) -> None:
        if where > self.cursor:
            self.cursor = where
            self.furthest = max(self.furthest, where)
            self.quiet_since = time.monotonic()
            self.rewound_at = None
            self._last = fields
            self._arrive((where, fields))
            if len(self._arrived) >= MAX_ARRIVED and not self._is_paused:
                self._is_paused = True
                self._line.pause(self)

    def follows(self, entries: list[tuple[bytes, Fields]]) -> bool:
        """Whether `entries`, now at the cursor on the server, are what was read there.

        If so, later entries continue the reply, whatever happened to earlier ones. A claim says nothing of what came
        before it, so it is never enough.
        """
        return bool(entries) and entries[0][1] == self._last and self._last.get(b"type") != b"own"

    def rewind(self) -> None:
        """Reads the reply from its beginning again; the assembler drops what is known."""
        self.cursor = (0, 0)
        self.rewound_at = time.monotonic()

    def fail(self, error: PenstockError) -> None:
        self._arrive(error)
        self.close()

    def _arrive(self, item: tuple[Position, Fields] | PenstockError) -> None:
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Line:
    """One blocking connection and the streams read over it, all of one hash slot under Redis Cluster."""

    def __init__(
        self,
        address: Address,
        blocking: RedisClient,
        commands: RedisClient,
        batcher: Batcher,
        wake_key: str,
        give_up_after_s: float,
        hear: Callable[[Exception | None], object],
    ) -> None:
        self._hear = hear
        self._address = address
        self._blocking = blocking
        self._commands = commands
        self._batcher = batcher
        self._wake_key = wake_key
        self._witness = Witness("EXPIRE", wake_key, WAKE_TTL_S)
        self._give_up_after_s = give_up_after_s
        self._followed: dict[str, set[Subscription]] = {}
        self._paused: set[Subscription] = set()
        self._not_empty = asyncio.Event()
        self._reading: dict[str, Position] | None = None  # what the XREAD in flight asks for
        self._readable: Mapping[str, Position] = {}  # what the last XREAD that had an answer asked for
        self._num_wakes = self._num_heard = 0
        self._wakes: set[asyncio.Task[None]] = set()
        self._checked_at = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="penstock-reader")

    def add(self, subscription: Subscription) -> None:
        self._followed.setdefault(subscription.key, set()).add(subscription)
        self._not_empty.set()
        if self._reading is None:
            return
        read_from = self._reading.get(subscription.key)
        if read_from is None or read_from > subscription.cursor:
            self._reading = None  # one wake-up per XREAD is enough
            self._wake_soon()

    def pause(self, subscription: Subscription) -> None:
        """Stops reading for the subscription until `resume`."""
        self.remove(subscription)
        self._paused.add(subscription)

    def resume(self, subscription: Subscription) -> None:
        if subscription in self._paused:
            self._paused.remove(subscription)
            self.add(subscription)

    def remove(self, subscription: Subscription) -> None:
        self._paused.discard(subscription)
        subscribers = self._followed.get(subscription.key, set())
        subscribers.discard(subscription)
        if not subscribers:
            self._followed.pop(subscription.key, None)
        if not self._followed:
            self._not_empty.clear()

    async def close(self) -> None:
        await end_tasks([self._task, *self._wakes])
        self._fail_all(lambda: ConnectionLost("the client was closed"))
        if self._num_wakes:
            # If that fails or takes long, the key is left to expire.
            with contextlib.suppress(exceptions.RedisError, *UNREACHABLE):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._commands.delete(self._wake_key)

    async def _run(self) -> None:
        lost_at: float | None = None
        num_failures = 0
        while True:
            if num_failures and not self._not_empty.is_set():  # nobody is left to hear how it ends
                self._hear(None)
                lost_at, num_failures = None, 0
            await self._not_empty.wait()
            try:
                if lost_at is not None:
                    await self._look_again()
                await self._read_once(None if num_failures else BLOCK_S)
                await self._check_quiet_ones()
                if num_failures:
                    self._hear(None)
                lost_at, num_failures = None, 0
            except Exception as error:  # whatever it is, the waiting readers must hear of it in the end
                if await self._failed_by_own_fault(error):
                    continue
                lost_at = lost_at or time.monotonic()
                num_failures += 1
                if not isinstance(error, Dropped):
                    self._hear(error)
                if time.monotonic() - lost_at > self._give_up_after_s or self._never_got_in(error):
                    self._fail_all(partial(as_ours, error, self._address))
                    lost_at = None
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, 0.02 * 2 ** min(num_failures, 10)))

    def _never_got_in(self, error: Exception) -> bool:
        """Whether Redis refuses permanently and has never let this client in. If it once did, it may do so again."""
        return is_refused(error) and not self._readable

    def _was_readable(self, sub: Subscription) -> bool:
        return sub.key in self._readable or sub.furthest > (0, 0)

    async def _read_once(self, block_s: float | None) -> None:
        asked = {key: _lowest(subscriptions) for key, subscriptions in self._followed.items()}
        cursors = {key: entry_id(cursor) for key, cursor in asked.items()}
        self._num_heard = self._num_wakes  # they were for streams that are in `asked` already
        cursors[self._wake_key] = f"{self._num_wakes}-0"
        self._reading = asked
        late = asyncio.get_running_loop().call_later((block_s or 0.0) + LATE_S, self._wake_soon)
        try:
            found = await read_streams(
                self._blocking, cursors, count=ENTRIES_PER_READ, block_s=block_s, witness=self._witness
            )
        finally:
            late.cancel()
            self._reading = None
        self._readable = asked
        for raw_key, entries in found:
            key = raw_key.decode()
            read_from = asked.get(key)
            for subscription in tuple(self._followed.get(key, ())):
                if read_from is None or subscription.cursor < read_from:
                    continue  # it joined meanwhile and needs earlier entries first
                for raw_id, fields in entries:
                    subscription.deliver(position(raw_id.decode()), fields)

    def _wake_soon(self) -> None:
        self._num_wakes += 1
        task = asyncio.create_task(self._wake(self._num_wakes))
        self._wakes.add(task)
        task.add_done_callback(self._wakes.discard)

    async def _wake(self, number: int) -> None:
        """Appends a wake-up entry. Its explicit id makes repetition harmless and involves no clock. A lost one is sent
        again until the blocked read has ended by itself.
        """
        delay_s = WAKE_RETRY_S
        while self._num_heard < number:
            try:
                await asyncio.gather(
                    self._batcher.execute("XADD", self._wake_key, "MAXLEN", 1, f"{number}-0", "w", ""),
                    self._batcher.execute("EXPIRE", self._wake_key, WAKE_TTL_S),
                )
            except (exceptions.RedisError, *UNREACHABLE) as error:
                log.debug("a wake-up was lost, the blocked read ends by itself within %g s: %s", BLOCK_S, error)
                await asyncio.sleep(random.uniform(0.5, 1.0) * delay_s)
                delay_s = min(MAX_BACKOFF_S, delay_s * 2)
            else:
                return

    async def _look_again(self) -> None:
        """Checks the cursors after an outage, which may have been a failover to a server without the last entries.

        If the entry that was read last is gone or differs, the reply is read anew. A reply of which nothing is left,
        not even the state, may yet be made again.
        """
        subs = self._all()
        async with self._commands.pipeline(transaction=False) as pipe:
            for sub in subs:
                pipe.hget(sub.state_key, "status")
                pipe.exists(sub.key)
                pipe.xrange(sub.key, entry_id(sub.cursor), entry_id(sub.cursor))
            answers = await pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and may_pass(answer):
                raise answer
        for sub, status, exists, entries in zip(subs, answers[::3], answers[1::3], answers[2::3], strict=True):
            was_read = sub.furthest > (0, 0)
            if exists == 0 and isinstance(status, bytes) and (was_read or status.decode(errors="replace") in ENDED):
                sub.fail(_expired(sub))
            elif was_read and isinstance(entries, list) and not sub.follows(entries):
                sub.rewind()

    async def _check_quiet_ones(self) -> None:
        """Fails the subscriptions whose stream vanished: XREAD would wait for it forever."""
        now = time.monotonic()
        if now - self._checked_at < GONE_CHECK_S:
            return
        self._checked_at = now
        quiet = [
            sub
            for sub in self._all()
            if now - sub.quiet_since >= GONE_CHECK_S
            and (sub.rewound_at is None or now - sub.rewound_at >= self._give_up_after_s)
        ]
        if not quiet:
            return
        begun = await asyncio.gather(*map(self._had_begun, quiet))
        replies = [(sub.key, sub.state_key, had_begun) for sub, had_begun in zip(quiet, begun, strict=True)]
        verdicts = await find_gone(self._commands, replies)
        for sub, gone in zip(quiet, verdicts, strict=True):
            if gone:
                sub.fail(_expired(sub))

    async def _had_begun(self, sub: Subscription) -> bool:
        """Whether there was a reply. If nothing of it was read here, that is known only once it has ended."""
        if sub.furthest > (0, 0):
            return True
        with contextlib.suppress(exceptions.NoPermissionError):  # a role from before this was asked for
            return bool(await self._batcher.execute("GET", sub.seen_key) == keys.NO_ENTRY.encode())
        return False

    async def _failed_by_own_fault(self, error: Exception) -> bool:
        """Whether single streams made the whole XREAD fail (wrong type, no permission). Their readers get the error.

        A permission lost later is not a stream's own fault: somebody has revoked it and may grant it again.
        """
        if may_pass(error) or not isinstance(error, exceptions.ResponseError):
            return False
        any_failed = False
        for key, readers in [(self._wake_key, self._all()), *((sub.key, [sub]) for sub in self._all())]:
            try:
                await read_streams(self._commands, {key: "0-0"}, count=1, block_s=None)
            except (exceptions.RedisError, *UNREACHABLE) as own_error:
                if may_pass(own_error):
                    return False
                denied = is_refused(own_error)
                for sub in [sub for sub in readers if not (denied and self._was_readable(sub))]:
                    any_failed = True
                    sub.fail(_unreadable(sub, key, own_error))
        return any_failed

    def _all(self) -> list[Subscription]:
        return [*self._paused, *(sub for subscribers in self._followed.values() for sub in subscribers)]

    def _fail_all(self, error: Callable[[], PenstockError]) -> None:
        for sub in self._all():
            sub.fail(error())


async def find_gone(redis: RedisClient, replies: list[tuple[str, str, bool]]) -> list[bool]:
    """Returns which replies of one hash slot are gone, given (key, key of the state, whether it had begun).

    A reply that has not begun is not gone. Where this client may not look, none is reported as gone.
    """
    async with redis.pipeline(transaction=False) as pipe:
        for reply_key, state_key, _ in replies:
            pipe.hget(state_key, "status")
            pipe.exists(reply_key)
        answers = await pipe.execute(raise_on_error=False)
    return [
        exists == 0 and ((isinstance(status, bytes) and status.decode(errors="replace") in ENDED) or was_there)
        for (_, _, was_there), status, exists in zip(replies, answers[::2], answers[1::2], strict=True)
    ]


def _lowest(subscriptions: set[Subscription]) -> Position:
    if len(subscriptions) == 1:  # nearly always; this runs for each reply at each read
        [subscription] = subscriptions
        return subscription.cursor
    return min(subscription.cursor for subscription in subscriptions)


def _unreadable(sub: Subscription, key: str, error: Exception) -> PenstockError:
    if is_junk(error) and key == sub.key:
        return ReplyCorrupt(sub.request_id, "its stream holds what no worker writes there")
    return ServerRefused(f"stream {key} can't be read: {error}")


def _expired(sub: Subscription) -> ReplyGone:
    return ReplyGone(sub.request_id, f"it expired, read up to entry {entry_id(sub.furthest)}")


class _OutageLog:
    """Logs one line for each outage, with a traceback if Redis is not the cause."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lost: set[int] = set()

    def __call__(self, slot: int, error: Exception | None) -> None:
        if error is None:
            self._lost.discard(slot)
        elif slot not in self._lost:
            self._lost.add(slot)
            unexpected = not isinstance(error, (exceptions.RedisError, *UNREACHABLE))
            log.warning("reading replies from %s failed: %s", self._address, error, exc_info=unexpected and error)
