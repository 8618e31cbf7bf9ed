"""Many prompts through one client: limited in flight, in order or as completed, with progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sized
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.producer.arguments import check_count, check_flag, check_many
from penstock.producer.progress import BulkProgress, ProgressCallback, check_progress, ignore, shown
from penstock.producer.request import Prompt, check_options
from penstock.protocol.errors import PenstockError
from penstock.protocol.reply import Reply
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import Sampling, in_python

READ_AHEAD = 4
"""Bound on ordered results that wait for slower ones before them, as a multiple of `max_in_flight`."""


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The outcome of one prompt: exactly one of `reply` and `error` is set. `index` counts prompts from 0."""

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

    def as_row(self) -> dict[str, str | int | None]:
        """Returns the outcome as a row of a table. `error` is None if there was none; else all others are None."""
        reply, error = self.reply, self.error
        return {
            "text": None if reply is None else reply.text,
            "finish_reason": None if reply is None else reply.finish_reason,
            "prompt_tokens": None if reply is None else reply.usage.prompt_tokens,
            "completion_tokens": None if reply is None else reply.usage.completion_tokens,
            "error": None if error is None else str(error),
        }


Generate: TypeAlias = Callable[[Prompt, Sampling], Awaitable[Reply]]
"""Source of the replies. A PenstockError that it raises is the result of that one prompt."""


def check_bulk(
    prompts: object, sampling: Sampling, *, max_in_flight: object, ordered: object, progress: object
) -> None:
    """Checks that `run_bulk` can begin with these arguments.

    Raises:
        TypeError, ValueError: one of them has the wrong type or is out of range.
        RequestRefused: an option is unknown or out of range, which is the same for all prompts.
    """
    check_many("prompts", prompts)
    if not isinstance(prompts, Iterable | AsyncIterable):
        raise TypeError(f"prompts must be an iterable of them, not one {type(prompts).__name__}")
    check_count("max_in_flight", max_in_flight)
    check_flag("ordered", ordered)
    check_progress(progress)
    if "id" in sampling:
        raise ValueError(f"one id {in_python(sampling['id'])} can't name many requests; put ids into GenerateRequests")
    check_options(sampling)


async def run_bulk(
    generate: Generate,
    prompts: Iterable[Prompt] | AsyncIterable[Prompt],
    sampling: Sampling,
    *,
    max_in_flight: int,
    ordered: bool,
    progress: bool | ProgressCallback,
    is_hopeless: Callable[[PenstockError], bool] = lambda _: False,
) -> AsyncGenerator[BulkResult, None]:
    """See `AsyncClient.map`; `check_bulk` has checked the arguments. An error that `is_hopeless` concerns all prompts,
    so it is raised.
    """
    total = len(prompts) if isinstance(prompts, Sized) else None
    run = _Bulk(generate, sampling, max_in_flight, total=total, is_hopeless=is_hopeless)
    with shown(progress) as report:
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
        self,
        generate: Generate,
        sampling: Sampling,
        max_in_flight: int,
        *,
        total: int | None,
        is_hopeless: Callable[[PenstockError], bool],
    ) -> None:
        self.report: ProgressCallback = ignore
        self._generate = generate
        self._sampling = sampling
        self._is_hopeless = is_hopeless
        self._progress = BulkProgress(total=total)
        self._started_at = time.monotonic()
        self._in_flight_budget = asyncio.Semaphore(max_in_flight)
        self._result_budget = asyncio.Semaphore(READ_AHEAD * max_in_flight)
        self._finished: asyncio.Queue[BulkResult | Exception | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def pump(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> None:
        """Starts a task per prompt within both limits. An error of the iterable itself goes to the consumer."""
        try:
            count = 0
            async for prompt in _aiter(prompts):
                await self._result_budget.acquire()
                await self._in_flight_budget.acquire()
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
            self._result_budget.release()
            yield item

    async def in_order(self) -> AsyncGenerator[BulkResult, None]:
        early: dict[int, BulkResult] = {}
        index = 0
        while (item := await self._finished.get()) is not None:
            if isinstance(item, Exception):
                raise item
            early[item.index] = item
            while index in early:
                self._result_budget.release()
                yield early.pop(index)
                index += 1

    async def stop(self, pump: asyncio.Task[None]) -> None:
        """Ends what still runs; each task cancels its own request."""
        await end_tasks([pump])
        await end_tasks(self._tasks)

    async def _one(self, index: int, prompt: Prompt) -> None:
        try:
            result = await self._result(index, prompt)
            now = self._progress
            self._advance(
                in_flight=now.in_flight - 1,
                done=now.done + 1,
                failed=now.failed + (result.error is not None),
                completion_tokens=now.completion_tokens + (result.reply.usage.completion_tokens if result.reply else 0),
            )
            self._finished.put_nowait(result)
        except Exception as error:  # hopeless, or a mistake in the call or the caller's callback: it ends the loop
            self._finished.put_nowait(error)
        finally:
            self._in_flight_budget.release()

    async def _result(self, index: int, prompt: Prompt) -> BulkResult:
        try:
            return BulkResult(index, prompt, await self._generate(prompt, self._sampling), None)
        except PenstockError as error:
            if self._is_hopeless(error):
                raise
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
