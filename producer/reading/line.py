"""One blocking read over many replies' streams, repeated for as long as somebody reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial

from redis import exceptions

from penstock.producer.reading.entries import Position, entry_id, position
from penstock.producer.reading.gone import ENDED, find_gone
from penstock.producer.reading.subscription import Subscription
from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, PenstockError, ReplyCorrupt, ReplyGone, ServerRefused
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import RedisClient, as_ours
from penstock.protocol.redis.faults import UNREACHABLE, Dropped, is_junk, is_refused, may_pass
from penstock.protocol.redis.moves import BLOCK_S, Witness
from penstock.protocol.redis.pipeline import Batcher
from penstock.protocol.redis.streams import read_streams
from penstock.protocol.tasks import end_tasks

log = logging.getLogger(__name__)

LATE_S = 0.5  # a blocked read that is overdue by this much is woken: the server's clock was set back
GONE_CHECK_S = 15.0
WAKE_TTL_S = 60
WAKE_RETRY_S = 0.05
ENTRIES_PER_READ = 256
MAX_BACKOFF_S = 1.0
CLOSE_TIMEOUT_S = 1.0


class Line:
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
        self._readable: Mapping[str, Position] = {}  # what the last answered XREAD had asked for
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
            # If the deletion fails or takes long, the key is left to expire.
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
        self._num_heard = self._num_wakes  # wake-ups so far were for streams that `asked` includes
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
                    continue  # this reader joined during the read, and needs earlier entries first
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

        If the entry that was read last is gone or differs, the reply is read again. A reply of which nothing is left,
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
        """Whether the reply had begun. If nothing of it was read here, this is known only once the reply has ended."""
        if sub.furthest > (0, 0):
            return True
        with contextlib.suppress(exceptions.NoPermissionError):  # the Redis user's role predates this command
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
