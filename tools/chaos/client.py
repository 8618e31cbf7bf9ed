"""Clients that record every entry they see, with its id. They read raw entries, so nothing is tidied up for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from redis import exceptions

from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Added, enqueue
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.streams import stream_entries
from penstock.protocol.wire import GenerateRequest
from penstock.tools.chaos.history import History, RequestRecord, Seen
from penstock.tools.chaos.plan import RequestPlan

BLOCK_S = 1.0
RETRY_S = 0.05
PAGE = 1000
MAX_TROUBLES = 5  # workers that end by themselves before the run counts as failed and stops waiting for replies
REQUEST_FIELDS = (
    *("id", "prompt", "max_tokens", "n", "min_tokens", "stop"),
    *("seed", "temperature", "ignore_eos", "timeout_s", "tenant", "priority"),
)

_T = TypeVar("_T")


class Clients:
    """Sends the requests of a plan, a limited number at a time, and follows each to its end.

    Args:
        redis: the client for commands.
        blocking: the client for reading, with one connection for each reply that is followed.
        direct: the client for reading what is left, past all proxies.
        queue: to send to.
        history: takes the records.
        patience_s: a reply that stalls for longer is given up.
        progress: called with the number of replies that have ended.
    """

    def __init__(
        self,
        redis: RedisClient,
        blocking: RedisClient,
        direct: RedisClient,
        queue: str,
        history: History,
        *,
        patience_s: float,
        progress: Callable[[int], None],
    ) -> None:
        self._redis = redis
        self._blocking = blocking
        self._direct = direct
        self._queue = queue
        self._history = history
        self._patience_s = patience_s
        self._progress = progress
        self._num_ended = 0

    async def run(self, requests: tuple[RequestPlan, ...], *, in_flight: int) -> None:
        """Sends all requests, and returns when each has ended or was given up."""
        gate = asyncio.Semaphore(in_flight)

        async def serve(request: RequestPlan) -> None:
            try:
                await self._serve(request)
            finally:
                gate.release()
                self._num_ended += 1
                self._progress(self._num_ended)

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                await gate.acquire()
                tasks.create_task(serve(request))

    async def audit(self) -> None:
        """Reads every reply stream once more when the run is over."""
        for request_id, record in self._history.records.items():
            record.stored = []
            start = "-"
            while page := await self._patiently(partial(self._page, request_id, start)):
                record.stored += page
                start = f"({page[-1].entry_id}"

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Waits until the queue is empty, and records what is left in it after `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            left = await self._patiently(lambda: self._direct.xlen(keys.requests(self._queue)))
            if not left or time.monotonic() > give_up_s:
                break
            await asyncio.sleep(RETRY_S)
        self._history.left_in_queue = left
        streams = (keys.dead(self._queue), keys.malformed(self._queue))
        self._history.dead_letters = sum([await self._patiently(partial(self._direct.xlen, each)) for each in streams])

    async def _page(self, request_id: str, start: str) -> list[Seen]:
        page: Any = await self._direct.xrange(keys.reply(self._queue, request_id), start, "+", PAGE)
        return [Seen(entry_id, fields) for entry_id, fields in page]

    async def _serve(self, request: RequestPlan) -> None:
        record = self._history.records[request.id] = RequestRecord(request)
        entry_ids = await asyncio.gather(*(self._enqueue(request) for _ in range(request.sends)))
        record.entry_ids += entry_ids
        await self._follow(record)

    async def _enqueue(self, request: RequestPlan) -> str:
        named = {name: getattr(request, name) for name in REQUEST_FIELDS}
        if request.is_chat:
            named |= {"prompt": None, "messages": [{"role": "user", "content": request.prompt}]}
        fields = GenerateRequest.model_validate({**named, **request.penalties, **request.form}).to_entry()
        answer = await self._patiently(
            lambda: enqueue(
                self._redis.execute_command, self._queue, request.id, fields, max_length=None, dedupe_window_s=3600
            )
        )
        return answer.entry_id if isinstance(answer, Added) else ""

    async def _follow(self, record: RequestRecord) -> None:
        key, last = keys.reply(self._queue, record.request.id), "0-0"
        cancel_key = keys.cancel(self._queue, record.request.id)
        num_tokens, is_cancelled = 0, False
        give_up_s = time.monotonic() + self._patience_s
        while not record.has_ended and time.monotonic() < give_up_s and len(self._history.troubles) < MAX_TROUBLES:
            cancel_after = record.request.cancel_after
            if cancel_after is not None and num_tokens >= cancel_after and not is_cancelled:
                is_cancelled = True
                await self._patiently(partial(self._redis.set, cancel_key, "1", ex=3600))
            try:
                answer: Any = await self._blocking.xread({key: last}, block=round(BLOCK_S * 1000))
            except (exceptions.RedisError, OSError):
                await asyncio.sleep(RETRY_S)
                continue
            now_s = time.monotonic()
            for _, entries in stream_entries(answer):
                for entry_id, fields in entries:
                    record.seen.append(Seen(str(entry_id), {str(k): str(v) for k, v in fields.items()}, now_s))
                    last, give_up_s = str(entry_id), now_s + self._patience_s
                    num_tokens += len(record.seen[-1].fields.get("tokens", "").split(","))

    async def _patiently(self, command: Callable[[], Awaitable[_T]]) -> _T:
        """Tries until the server answers; what is sent here may be executed any number of times."""
        give_up_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await command()
            except (exceptions.RedisError, OSError):
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(RETRY_S)
