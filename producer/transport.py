"""Everything that the client does to Redis except waiting for replies: enqueue, cancel, query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from redis import exceptions

from penstock.producer.arguments import LONGEST_S, check_count, check_flag, check_name
from penstock.producer.calls import CallClient
from penstock.producer.connections import Connections
from penstock.producer.patience import Patience
from penstock.producer.reading.entries import decode_fields, position
from penstock.producer.reading.gone import ENDED, find_gone
from penstock.producer.reading.subscription import Subscription
from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, NotDurable, QueueFull, ReplyGone, ServerRefused, UnknownRequest
from penstock.protocol.ids import new_id
from penstock.protocol.queue.cancelling import cancel
from penstock.protocol.queue.enqueue import Added, Full, Late, enqueue
from penstock.protocol.queue.status import QueueStatus, ServedWatch, query_card, query_queues, query_status
from penstock.protocol.redis import durable
from penstock.protocol.redis.connection import RedisClient, ensure_group
from penstock.protocol.redis.streams import is_entry_id, read_newest, read_range
from penstock.protocol.tasks import Joined, end_tasks
from penstock.protocol.wire import GenerateRequest, ModelCard, ReplyEntry

if TYPE_CHECKING:
    from penstock.protocol.telemetry.client_spans import ClientSpans

State = Literal["unknown", "queued", "running", "lost", "finished"]
"""The state of a request. A request that a draining worker handed back is `queued` again. `lost`: its worker is gone,
and another worker will take it over. `unknown`: see `UnknownRequest`.
"""

NO_ENTRY = keys.NO_ENTRY.encode()
CLOSE_TIMEOUT_S = 2.0
HISTORY_PAGE = 1000


class Transport:
    """One queue of a client, and its settings."""

    def __init__(
        self,
        connections: Connections,
        *,
        queue: str,
        max_queue_length: int | None,
        dedupe_window_s: int,
        is_durable: bool = False,
        spans: ClientSpans | None = None,
    ) -> None:
        check_name("queue", queue)
        if max_queue_length is not None:
            max_queue_length = check_count("max_queue_length", max_queue_length)
        dedupe_window_s = check_count("dedupe_window_s", dedupe_window_s, most=int(LONGEST_S))
        self.connections = connections
        self.address = connections.address
        self.reader = connections.reader
        self.queue = queue
        self.spans = spans  # None: requests are not traced
        self._max_queue_length = max_queue_length
        self._dedupe_window_s = dedupe_window_s
        self._is_durable = check_flag("durable", is_durable)
        self._looks_ahead = max_queue_length is not None  # a caller without a limit wants to wait
        self._batcher = connections.batcher
        self._redis = connections.redis
        self.caller = CallClient(self.address, connections.calls, self._batcher.execute, queue)
        self._served = ServedWatch(self._batcher.execute, queue)
        self._setup = Joined(self._set_up)  # shared: alone, each caller would wait for all earlier failures
        self._is_set_up = False
        self._owned: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    def beside(self, queue: str) -> Transport:
        """Returns the transport of another queue, over the same connections and with the same settings."""
        return Transport(
            self.connections,
            queue=queue,
            max_queue_length=self._max_queue_length,
            dedupe_window_s=self._dedupe_window_s,
            is_durable=self._is_durable,
            spans=self.spans,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running, so that `close` would have nothing to do."""
        is_busy = self._owned or self._background or self._setup.is_running
        return not is_busy and self.caller.is_idle and self._served.is_idle

    def new_id(self) -> str:
        return new_id(self.connections.slot)

    async def enqueue(self, request: GenerateRequest) -> bool:
        """Adds the request to the queue once, however often this is called or the network repeats it.

        Returns:
            Whether the request was sent before.

        Raises:
            QueueFull, ConnectionLost, ServerRefused: it was not added, or (ConnectionLost) may have been.
            NotDurable: it was added, but is not known to be on disk.
        """
        with self._traced(request) as traced:
            return await self._enqueue(traced)

    async def _enqueue(self, request: GenerateRequest) -> bool:
        assert request.id is not None  # noqa: S101  build_request has seen to it
        if not self._is_set_up:
            await self._setup.run()
        async with self.connections.answered():
            added = await self._add(request.id, request.to_entry())
        if isinstance(added, Full):
            raise QueueFull(self.queue, added.length, self._max_queue_length or 0)
        if isinstance(added, Late):
            limit, timeout_s = self._max_queue_length or 0, request.timeout_s or 0.0
            raise QueueFull(self.queue, added.length, limit, wait_s=added.wait_s, timeout_s=timeout_s)
        self._served.note_sent()
        if self._is_durable:
            await self._confirm(request.id)
        return added.again

    async def _add(self, request_id: str, fields: Mapping[str, str]) -> Added | Full | Late:
        add = partial(
            enqueue,
            self._batcher.execute,
            self.queue,
            request_id,
            fields,
            max_length=self._max_queue_length,
            dedupe_window_s=self._dedupe_window_s,
        )
        if self._looks_ahead:
            try:
                return await add()
            except exceptions.NoPermissionError:  # the role predates `keys.load`, or may not enqueue at all
                added = await add(looks_ahead=False)
                self._looks_ahead = False
                return added
        return await add(looks_ahead=False)

    async def send(self, request: GenerateRequest) -> None:
        """Enqueues the request, and checks that one that was sent before can be followed.

        Raises:
            As `enqueue` and `check_present`.
        """
        if await self.enqueue(request):
            await self.check_present(self.queue, request.id or "")

    async def send_with_patience(self, patience: Patience, request: GenerateRequest) -> None:
        """Sends the request, but waits while the queue is full, or Redis is away or accepts nothing. `patience` decides
        which errors are raised.
        """
        with self._traced(request) as traced:
            was_sent = await patience.persist(partial(self._enqueue, traced))
        if was_sent:
            await patience.persist(partial(self.check_present, self.queue, request.id or ""))

    def _traced(self, request: GenerateRequest) -> AbstractContextManager[GenerateRequest]:
        """Yields the request to send, within its trace."""
        return nullcontext(request) if self.spans is None else self.spans.sending(self.queue, request)

    async def status(self) -> QueueStatus:
        """Returns the queue's status now."""
        async with self.connections.answered():
            return await query_status(self._batcher.execute, self.queue)

    async def card(self, queue: str) -> ModelCard | None:
        """Returns the card of what the workers of `queue` serve; None if it has no workers.

        Raises:
            ServerRefused: the card's key holds something else.
        """
        try:
            async with self.connections.answered():
                return await query_card(self._batcher.execute, queue)
        except ValueError as error:
            raise ServerRefused(f"queue {queue!r}: {error}", is_junk=True) from error

    async def queues(self) -> tuple[str, ...]:
        """Returns the queues that are served."""
        async with self.connections.answered():
            return await query_queues(self._batcher.execute)

    async def cancel(self, queue: str, request_id: str) -> None:
        async with self._redis() as redis:
            await cancel(redis, queue, request_id)

    def own(self, request_id: str) -> None:
        """Notes a request whose id only its caller knows: `close` cancels it."""
        self._owned.add(request_id)

    def disown(self, request_id: str, *, cancel: bool) -> None:
        """Undoes `own`, from a place that must not wait. Harmless if the request is not owned, or no longer."""
        if request_id in self._owned:
            self._owned.discard(request_id)
            if cancel and self.connections.has_connected:  # else it was never sent
                task = asyncio.get_running_loop().create_task(self._try_to_cancel(request_id))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    async def state(self, queue: str, request_id: str) -> State:
        """Returns the request's state now, from its workers' notes and the last one's heartbeat.

        Raises:
            ReplyGone: it ended and its reply expired.
            ReplyCorrupt: its entries do not follow the schema.
        """
        async with self._redis() as redis:
            job: Any = await redis.hmget(keys.state(queue, request_id), ["status", "worker"])
            status, worker = (None if value is None else value.decode(errors="replace") for value in job)
            newest = await read_newest(redis, keys.reply(queue, request_id))
            if newest is not None and decode_fields(request_id, newest[1]).type == "end":
                return "finished"  # as soon as its end can be read, which is before its worker notes it
            if status == "running":
                alive = await redis.exists(keys.heartbeat(queue, worker or ""))
                return "running" if alive else "lost"
        if status in ENDED:
            raise ReplyGone(request_id, "it ended and expired")
        has_begun = status is not None or newest is not None
        return "queued" if has_begun or await self._is_queued(queue, request_id) is not False else "unknown"

    async def check_present(self, queue: str, request_id: str) -> None:
        """Passes if there is or will be a reply, or if this client may not look.

        Raises:
            ReplyGone: it ended and expired.
            UnknownRequest: nobody has sent it.
        """
        reply_key, state_key = keys.reply(queue, request_id), keys.state(queue, request_id)
        async with self._redis() as redis:
            (gone,) = await find_gone(redis, [(reply_key, state_key, False)])
            if gone:
                raise ReplyGone(request_id, "it ended and expired")
            with suppress(exceptions.NoPermissionError):
                if await redis.exists(state_key, reply_key):
                    return
        if await self._is_queued(queue, request_id) is False:
            raise UnknownRequest(queue, request_id)

    async def _is_queued(self, queue: str, request_id: str) -> bool | None:
        """Whether a request that no worker has taken yet was sent at all; None: this client may not look.

        Raises:
            ReplyGone: it was sent, and there is nothing left of it.
        """
        async with self._redis() as redis:
            with suppress(exceptions.NoPermissionError):  # a role from before this was asked for
                entry: Any = await redis.get(keys.seen(queue, request_id))
                if entry is None and not is_entry_id(request_id):
                    return False
                if queue not in self.connections.unreadable and entry != NO_ENTRY:
                    with suppress(exceptions.NoPermissionError):
                        return await _has_entry(redis, queue, request_id, entry)
                    self.connections.unreadable.append(queue)
                if entry == NO_ENTRY:
                    await _check_begun(redis, queue, request_id)
                return None if entry is None else True
        return None

    async def history(self, queue: str, request_id: str, until: str) -> AsyncIterator[tuple[str, ReplyEntry]]:
        """Yields the entries of a reply from its first to `until`.

        Raises:
            ReplyGone: `until` is not one of its entries.
            ValueError: `until` is not an entry id.
        """
        start, last = "-", position(until)
        while True:
            async with self._redis() as redis:
                page = await read_range(redis, keys.reply(queue, request_id), start, until, count=HISTORY_PAGE)
            for entry_id, fields in page:
                yield entry_id, decode_fields(request_id, fields)
            if page and position(page[-1][0]) == last:
                return
            if len(page) < HISTORY_PAGE:
                raise ReplyGone(request_id, f"entry {until} is not in it; it expired, or the entry never was")
            start = "(" + page[-1][0]

    def follow(self, queue: str, request_id: str, after: str = "0-0") -> Subscription:
        """Follows a reply, see `ReplyReader.follow`. Raises RuntimeError as `Connections.check_loop`."""
        self.connections.check_loop()
        return self.reader.follow(queue, request_id, after)

    async def close(self) -> None:
        """Ends this queue's work, but leaves the connections open, as other queues may use them."""
        owned, self._owned = self._owned, set()
        if not self.connections.has_connected:
            owned.clear()  # none was ever sent
        cancels = {*self._background, *(asyncio.create_task(self._try_to_cancel(each)) for each in owned)}
        if cancels:
            await asyncio.wait(cancels, timeout=CLOSE_TIMEOUT_S)
            await end_tasks(cancels)
        await self._setup.close()
        await self.caller.close()
        await self._served.close()

    async def _set_up(self) -> None:
        """Prepares the queue before a client's first request."""
        async with self._redis() as redis:
            await ensure_group(redis, self.queue)
            if self._is_durable:
                await durable.probe(redis, keys.requests(self.queue))
        self._is_set_up = True

    async def _confirm(self, request_id: str) -> None:
        async with self._redis() as redis:
            reason = await durable.confirm(redis, keys.seen(self.queue, request_id), ttl_s=self._dedupe_window_s)
        if reason is not None:
            raise NotDurable(request_id, reason)

    async def _try_to_cancel(self, request_id: str) -> None:
        """Cancels the request if possible. Failing is harmless: the request just runs to its end."""
        with suppress(ConnectionLost, ServerRefused):
            await self.cancel(self.queue, request_id)


async def _has_entry(redis: RedisClient, queue: str, request_id: str, entry: bytes | None) -> bool:
    """Whether a request that had not begun when the caller looked is in the queue, or has begun since.

    Args:
        redis: a client of the server.
        queue: the queue that it was sent to.
        request_id: the request's id. It is taken for the id of the queue entry if `entry` is None.
        entry: the id of the queue entry, as the client library noted it; None: nothing was noted.

    Raises:
        ReplyGone: it was sent, and there is nothing left of it.
    """
    sought = request_id if entry is None else entry
    if await redis.xrange(keys.requests(queue), sought, sought):
        return True
    if entry is None:
        return False
    await _check_begun(redis, queue, request_id)
    return True


async def _check_begun(redis: RedisClient, queue: str, request_id: str) -> None:
    """Raises ReplyGone if a request that has left the queue has left nothing."""
    if not await redis.exists(keys.state(queue, request_id), keys.reply(queue, request_id)):
        raise ReplyGone(request_id, "it ended and expired")
