"""Runs a load on the workers of a queue, through Redis, streamed to clients in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from penstock.engine.progress import ReportProgress, silent
from penstock.producer import AsyncClient, PenstockError
from penstock.producer.request import Prompt
from penstock.protocol.wire import Sampling
from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.recorder import Recorder, Timeline, end, fail, note
from penstock.tools.bench.traffic.datasets import BenchRequest
from penstock.tools.bench.traffic.load import Load


async def run_on_service(
    url: str,
    queue: str,
    load: Load,
    progress: ReportProgress = silent,
    *,
    num_clients: int = 1,
    timeout_s: float | None = None,
) -> Recorder:
    """Sends every request of `load` and reads all replies to their ends.

    Requests are spread over `num_clients` clients, each with a blocking connection of its own. A request that fails, or
    does not end within `timeout_s`, is recorded as failed; the others go on.

    Raises:
        ImpossibleLoad: `num_clients` or `timeout_s` is out of range. ConnectionLost, ServerRefused: Redis can't be
            reached, or refuses.
    """
    if num_clients < 1:
        raise ImpossibleLoad(f"--clients must be 1 or more, not {num_clients}")
    if timeout_s is not None and timeout_s <= 0:
        raise ImpossibleLoad(f"--timeout must be above 0, not {timeout_s:g}")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(url, queue=queue, max_queue_length=None))
            for _ in range(num_clients)
        ]
        await asyncio.gather(*(client.handle("bench-hello").state() for client in clients))  # connects
        return await _Run(clients, load, progress, timeout_s).run()


class _Run:
    def __init__(
        self, clients: Sequence[AsyncClient], load: Load, progress: ReportProgress, timeout_s: float | None
    ) -> None:
        self._clients = clients
        self._load = load
        self._progress = progress
        self._timeout_s = timeout_s
        self._recorder = Recorder()
        self._num_sent = self._num_ended = 0

    async def run(self) -> Recorder:
        requests, limit = self._load.requests, self._load.arrivals.concurrency
        gate = asyncio.Semaphore(limit or len(requests))
        async with asyncio.TaskGroup() as group:
            for place, (request, time_s) in enumerate(zip(requests, self._load.times_s(), strict=True)):
                wait_s = self._recorder.start_s + time_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                await gate.acquire()
                self._num_sent += 1
                timeline = self._recorder.arrive(None if limit is not None else time_s)
                client = self._clients[place % len(self._clients)]
                group.create_task(self._follow(client, request, timeline, place, gate))
        return self._recorder

    async def _follow(
        self, client: AsyncClient, request: BenchRequest, timeline: Timeline, place: int, gate: asyncio.Semaphore
    ) -> None:
        options: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "temperature": self._load.temperature,
            "seed": place,
            **request.whose(),
        }
        try:
            async with client.stream(
                cast("Prompt", request.said()), timeout=self._timeout_s, **cast("Sampling", options)
            ) as chunks:
                async for chunk in chunks:
                    note(timeline, len(chunk.tokens), time.perf_counter())
                reply = await chunks.read_to_end()
        except PenstockError as error:
            fail(timeline, str(error), time.perf_counter())
        else:
            end(timeline, reply.finish_reason, reply.usage.prompt_tokens, time.perf_counter())
        finally:
            gate.release()
            self._num_ended += 1
            self._progress(self._num_ended, len(self._load.requests), f"{self._num_sent - self._num_ended} under way")
