"""Many prompts through one client: bounded in flight, in order or as completed, with progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sized
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.producer.errors import PenstockError
from penstock.producer.handle import send_and_follow
from penstock.producer.redis.connection import cancel_and_wait
from penstock.producer.reply import Reply
from penstock.producer.request import Prompt, Sampling
from penstock.producer.transport import Transport

READ_AHEAD = 4
"""Ordered results wait for slower ones before them: at most this many times `max_in_flight`."""


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What became of one prompt: exactly one of `reply` and `error` is set. `index` counts prompts from 0."""

    index: int
    prompt: Prompt
    reply: Reply | None
    error: PenstockError | None

    @property
    def text(self) -> str:
        """The text of the reply.

        Raises:
            PenstockError: the one in `error`.
        """
        if self.reply is None:
            raise self.error or PenstockError("a result without reply and error")
        return self.reply.text


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """How far a `map` is. `total` is None while the prompts are not all known; `done` counts the failed ones too."""

    total: int | None = None
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        """Prompts per second so far."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0


ProgressCallback: TypeAlias = Callable[[BulkProgress], None]


async def run_bulk(
    transport: Transport,
    prompts: Iterable[Prompt] | AsyncIterable[Prompt],
    sampling: Sampling,
    *,
    max_in_flight: int,
    ordered: bool,
    progress: bool | ProgressCallback,
    timeout_s: float | None,
) -> AsyncGenerator[BulkResult, None]:
    """See `AsyncClient.map`."""
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight {max_in_flight} is below 1")
    if "id" in sampling:
        raise ValueError(f"one id {sampling['id']!r} can't name many requests; put ids into GenerateRequests")
    run = _Bulk(
        transport, sampling, max_in_flight, timeout_s, total=len(prompts) if isinstance(prompts, Sized) else None
    )
    with _shown(progress) as report:
        run.report = report
        pump = asyncio.create_task(run.pump(prompts))
        try:
            async with aclosing(run.in_order() if ordered else run.as_completed()) as results:
                async for result in results:
                    yield result
        finally:
            await run.stop(pump)


class _Bulk:
    """The state of one `map`."""

    def __init__(
        self, transport: Transport, sampling: Sampling, max_in_flight: int, timeout_s: float | None, total: int | None
    ) -> None:
        self.report: ProgressCallback = _ignore
        self._transport = transport
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._progress = BulkProgress(total=total)
        self._started_at = time.monotonic()
        self._room_in_flight = asyncio.Semaphore(max_in_flight)
        self._room_for_results = asyncio.Semaphore(READ_AHEAD * max_in_flight)
        self._finished: asyncio.Queue[BulkResult | Exception | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def pump(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> None:
        """Starts a task per prompt while there is room; an error of the iterable itself is handed to the consumer."""
        try:
            count = 0
            async for prompt in _aiter(prompts):
                await self._room_for_results.acquire()
                await self._room_in_flight.acquire()
                self._advance(in_flight=self._progress.in_flight + 1)
                task = asyncio.create_task(self._one(count, prompt))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                count += 1
            self._advance(total=count)
            await asyncio.gather(*self._tasks)
        except Exception as error:
            self._finished.put_nowait(error)
        else:
            self._finished.put_nowait(None)

    async def as_completed(self) -> AsyncGenerator[BulkResult, None]:
        while (item := await self._finished.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self._room_for_results.release()
            yield item

    async def in_order(self) -> AsyncGenerator[BulkResult, None]:
        early: dict[int, BulkResult] = {}
        index = 0
        while (item := await self._finished.get()) is not None:
            if isinstance(item, Exception):
                raise item
            early[item.index] = item
            while index in early:
                self._room_for_results.release()
                yield early.pop(index)
                index += 1

    async def stop(self, pump: asyncio.Task[None]) -> None:
        """Ends what still runs; each task cancels its own request."""
        await cancel_and_wait(pump)
        await cancel_and_wait(*self._tasks)

    async def _one(self, index: int, prompt: Prompt) -> None:
        try:
            result = await self._generate(index, prompt)
            now = self._progress
            self._advance(
                in_flight=now.in_flight - 1,
                done=now.done + 1,
                failed=now.failed + (result.error is not None),
                completion_tokens=now.completion_tokens + (result.reply.usage.completion_tokens if result.reply else 0),
            )
            self._finished.put_nowait(result)
        except Exception as error:  # a mistake in the call, or in the caller's callback: it ends the loop there
            self._finished.put_nowait(error)
        finally:
            self._room_in_flight.release()

    async def _generate(self, index: int, prompt: Prompt) -> BulkResult:
        enqueue = self._transport.enqueue_when_there_is_room
        try:
            stream = send_and_follow(
                self._transport, prompt, self._sampling, enqueue=enqueue, timeout_s=self._timeout_s
            )
            return BulkResult(index, prompt, await stream.read_to_end(), None)
        except PenstockError as error:
            return BulkResult(index, prompt, None, error)

    def _advance(self, **changes: int) -> None:
        elapsed_s = time.monotonic() - self._started_at
        self._progress = replace(self._progress, elapsed_s=elapsed_s, **changes)
        self.report(self._progress)


async def _aiter(prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncIterator[Prompt]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt


def _shown(progress: bool | ProgressCallback) -> AbstractContextManager[ProgressCallback]:
    if callable(progress):
        return nullcontext(progress)
    if progress:
        from penstock.producer.progress import shown_bar

        return shown_bar()
    return nullcontext(_ignore)


def _ignore(progress: BulkProgress) -> None:
    """Nobody looks."""
