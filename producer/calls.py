"""Calls: questions that a worker answers at once, however much it has to generate."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import suppress

from redis import exceptions

from penstock.producer.arguments import check_seconds
from penstock.protocol import keys
from penstock.protocol.errors import (
    CallFailed,
    CallTimedOut,
    ConnectionLost,
    PenstockError,
    QueueFull,
    RequestRefused,
    ServerRefused,
)
from penstock.protocol.ids import new_id
from penstock.protocol.queue.calls import CallOutcome, drop_answers, send_call
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.redis.address import Address
from penstock.protocol.redis.connection import RedisClient, as_ours, redis_errors
from penstock.protocol.redis.faults import UNREACHABLE, may_pass
from penstock.protocol.redis.moves import BLOCK_S, Witness
from penstock.protocol.redis.streams import Streams, read_streams
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import MAX_TIMEOUT_MS, REFUSED_CODES, AnswerEntry, CallName, decode_answer

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 10.0
JUNK_RETRY_S = 0.1
MAX_WAITING = 1000  # calls of all clients that no worker has answered yet
ANSWERS_PER_READ = 64
SMALL_BYTES = 1 << 16  # reading an answer of this size is quicker than starting a thread for it
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


def check_timeout(value: object) -> float:
    """The `timeout` of a call, in seconds. Raises as `check_seconds`."""
    return check_seconds("timeout", value, above=0.0, most=MAX_TIMEOUT_MS / 1000)


class CallClient:
    """Sends the calls of one client, and reads their answers over one connection while any are due.

    All answers arrive on one stream, the client's mailbox, whose name has 144 random bits. `redis` blocks for
    `BLOCK_S`; its creator closes it.
    """

    def __init__(self, address: Address, redis: RedisClient, execute: Execute, queue: str) -> None:
        self._address = address
        self._redis = redis
        self._execute = execute
        self._queue = queue
        self._mailbox = new_id()
        self._cursor = "0-0"
        self._witness = Witness("XTRIM", keys.answers(queue, self._mailbox), "MINID", "0-0")
        self._waiting: dict[str, asyncio.Future[AnswerEntry]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, name: CallName, request: Mapping[str, str], *, timeout_s: float) -> AnswerEntry:
        """Asks a worker of the queue and waits for its answer.

        Args:
            name: what is asked.
            request: the fields of the request that the question is about.
            timeout_s: how long to wait, as `check_timeout` has it; no worker takes the call up later.

        Raises:
            CallTimedOut: no worker answered in time.
            RequestRefused: the request can't be served.
            CallFailed: the worker could not answer, through no fault of the request.
            QueueFull: too many calls wait.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        call_id, sent = new_id(), None
        answer = self._expect(call_id)
        fields = {"call": name, "id": call_id, "to": self._mailbox, "timeout_ms": str(max(1, round(timeout_s * 1000)))}
        try:
            async with asyncio.timeout(timeout_s):
                sent = await self._send({**request, **fields})  # the id beside the request is the call's
                return _checked(name, await answer)
        except TimeoutError:
            raise CallTimedOut(name, self._queue, timeout_s, is_served=sent is None or sent.is_served) from None
        finally:
            del self._waiting[call_id]

    @property
    def is_idle(self) -> bool:
        """Whether the caller has nothing to wait for and nothing to close."""
        return not self._waiting and (self._reader is None or self._reader.done())

    async def close(self) -> None:
        """Stops reading. Callers that still wait get ConnectionLost."""
        if self._reader is not None:
            await end_tasks([self._reader])
        self._fail(ConnectionLost("the client was closed"))

    def _expect(self, call_id: str) -> asyncio.Future[AnswerEntry]:
        answer: asyncio.Future[AnswerEntry] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="penstock-answers")
        return answer

    async def _send(self, fields: Mapping[str, str]) -> CallOutcome:
        while True:
            try:
                with redis_errors(self._address):
                    sent = await send_call(self._execute, self._queue, fields, max_waiting=MAX_WAITING)
                break
            except ServerRefused as error:
                if not error.is_junk:
                    raise
            await asyncio.sleep(JUNK_RETRY_S)  # workers set it aside; the call's own time-out ends this
        if sent.is_full:
            raise QueueFull(self._queue, sent.num_waiting, MAX_WAITING, what="calls")
        return sent

    async def _read(self) -> None:
        """Reads until no call waits for an answer. A read changes nothing on the server, so it may be repeated."""
        backoff_s = FIRST_BACKOFF_S
        while self._waiting:
            try:
                await self._read_once()
                backoff_s = FIRST_BACKOFF_S
            except (exceptions.RedisError, *UNREACHABLE) as error:
                if not may_pass(error):
                    self._fail(as_ours(error, self._address))
                    return
                log.debug("answers can't be read: %s", error)  # each call has its own time-out
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _read_once(self) -> None:
        streams = await read_streams(
            self._redis,
            {keys.answers(self._queue, self._mailbox): self._cursor},
            count=ANSWERS_PER_READ,
            block_s=BLOCK_S,
            witness=self._witness,
        )
        if await self._deliver(streams):
            with suppress(exceptions.RedisError, *UNREACHABLE):  # they expire
                await drop_answers(self._execute, self._queue, self._mailbox, self._cursor)

    async def _deliver(self, streams: Streams) -> bool:
        """Hands answers to the calls that wait for them. Returns whether there were any."""
        for _, entries in streams:
            for entry_id, fields in entries:
                self._cursor = entry_id.decode()
                try:
                    answer = await _decoded(fields)
                except ValueError as error:
                    log.warning("%s", error)
                    continue
                waiter = self._waiting.get(answer.id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(answer)
        return bool(streams)

    def _fail(self, error: PenstockError) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # also retrieved here, as the caller may have gone


async def _decoded(fields: Mapping[bytes, bytes]) -> AnswerEntry:
    """Decodes an answer, a large one in a thread: a million tokens take a tenth of a second."""
    if sum(map(len, fields.values())) <= SMALL_BYTES:
        return decode_answer(fields)
    return await asyncio.to_thread(decode_answer, fields)


def _checked(name: CallName, answer: AnswerEntry) -> AnswerEntry:
    if answer.code in REFUSED_CODES:
        raise RequestRefused(answer.id, answer.code, answer.message or "")
    if answer.code is not None:
        raise CallFailed(name, answer.code, answer.message or "")
    return answer
