"""Runs an engine on a thread of its own, for callers in an asyncio event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.engine.errors import EngineError, InvalidRequest, failure_message
from penstock.engine.request import FinishReason, Output, Request
from penstock.engine.stats import EngineStats, worth_trying

OutputSink = Callable[[Output], None]
"""Called on the event loop with each output of one request, in order, until its last choice has finished."""


class StepEngine(Protocol):
    """What the driver needs: `engine.Engine` or a fake. One thread at a time uses it; any may call `check`."""

    @property
    def max_num_seqs(self) -> int: ...

    def check(self, request: Request) -> None:
        """Raises RequestError if the engine can never serve `request`. Reads only immutable state."""

    def enqueue(self, request: Request) -> None:
        """Queues a request that passed `check`. If this raises, the engine keeps nothing of it."""

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Ends every choice of a request with `reason`; the next step reports it. Ignores an unknown id."""

    def step(self) -> list[Output]: ...

    def has_work(self) -> bool: ...

    def slack_s(self) -> float:
        """Returns the seconds that the next step may wait for more requests at no cost."""

    def stats(self) -> EngineStats: ...


class DriverStopped(EngineError):
    """The engine's thread is not running: it was stopped, or an error ended it."""


@dataclass(slots=True)
class _Active:
    sink: OutputSink
    num_unfinished: int  # choices


class EngineDriver:
    """Feeds a `StepEngine` from an event loop and hands its outputs back, at most once per step.

    All methods belong to the event loop that `start` ran on. The thread sleeps while the engine has nothing to do.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None asks the thread to end
        self._active: dict[str, _Active] = {}
        self._stats = engine.stats()
        self._patience_s = 0.0
        self._notify_capacity: Callable[[], None] = lambda: None
        self._outputs: list[Output] = []  # owned by the thread: not handed over yet
        self._due_s = 0.0  # owned by the thread: when to hand them over (monotonic)
        self._passed_on_s = 0.0  # owned by the thread: when the last step ended (monotonic)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step it is in. Requests still running produce nothing more."""
        if self._thread is None or self._ended is None:
            return
        self._inbox.put(None)
        await asyncio.wait([self._ended])
        self._thread.join()
        self._thread = None
        self._active.clear()

    async def wait_ended(self) -> None:
        """Returns once `stop` has ended the thread; otherwise raises the error that ended it."""
        await asyncio.shield(self._running()[1])

    def set_patience(self, seconds: float) -> None:
        """Sets how long outputs may be held to be handed over together, except a request's first and last ones.

        They are not held while a step runs that is expected to end later than that.

        Waking the event loop can take longer than a step of a small model takes on the host. The default is no wait.
        """
        self._patience_s = seconds

    def watch_capacity(self, notify: Callable[[], None]) -> None:
        """Calls `notify` after each step that frees capacity: `spare` may be above 0 again."""
        self._notify_capacity = notify

    @property
    def stats(self) -> EngineStats:
        """Statistics as of the last finished step."""
        return self._stats

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""
        return self._engine.max_num_seqs

    @property
    def spare(self) -> int:
        """Number of additional sequences that would run at once instead of waiting."""
        free = self._engine.max_num_seqs - sum(active.num_unfinished for active in self._active.values())
        return max(0, min(free, _room(self._stats, free)))

    def check(self, request: Request) -> None:
        """Raises RequestError if the engine can never serve `request`. Any thread may call this."""
        self._engine.check(request)

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Hands `request` to the engine; calls `sink` with its outputs.

        Raises:
            RequestError: the engine can never serve it, or its id is in use.
            DriverStopped: the thread is not running.
        """
        if self._thread is None or self._ended is None or self._ended.done():
            raise DriverStopped("the engine's thread is not running")
        if request.id in self._active:
            raise InvalidRequest(f"a request with id {request.id!r} is running already")
        self._engine.check(request)
        self._active[request.id] = _Active(sink, request.n)
        self._inbox.put(lambda: self._enqueue(request))

    def abort(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Ends a request early; its sink still gets the final outputs. Ignores an unknown id."""
        if request_id in self._active:
            self._inbox.put(lambda: self._engine.abort(request_id, reason))

    def forget(self, request_id: str) -> None:
        """Aborts a request without calling its sink again. The id stays in use until the engine has released it."""
        if request_id in self._active:
            self._active[request_id].sink = self._note_forgotten
            self.abort(request_id)

    def is_active(self, request_id: str) -> bool:
        """Whether the engine still holds anything of this request."""
        return request_id in self._active

    @property
    def is_idle(self) -> bool:
        """Whether the engine holds nothing at all."""
        return not self._active

    async def hand_over(self) -> None:
        """Delivers what was generated so far. Returns after the current step, at once if the thread is not running."""
        loop, ended = self._running()
        handed_over: asyncio.Future[None] = loop.create_future()

        def hand_over() -> None:
            self._hand_over()
            self._on_loop(handed_over.set_result, None)

        self._inbox.put(hand_over)
        await asyncio.wait((handed_over, ended), return_when=asyncio.FIRST_COMPLETED)

    def _running(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]:
        if self._loop is None or self._ended is None:
            raise DriverStopped("the driver was never started")
        return self._loop, self._ended

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._take_inbox():
                outputs = self._engine.step()
                self._note_stats()
                self._pass_on(outputs)
        except BaseException as error:  # `wait_ended` raises whatever ended the thread
            failure = error
        self._hand_over()
        self._on_loop(self._end, failure)

    def _enqueue(self, request: Request) -> None:
        """Queues a request in the engine. If that fails, the request ends like one that fails later."""
        try:
            self._engine.enqueue(request)
        except Exception as error:
            self._on_loop(self._deliver, [_failed(request, index, error) for index in range(request.n)])

    def _note_stats(self) -> None:
        before, self._stats = self._stats, self._engine.stats()
        most = self._engine.max_num_seqs
        if _room(before, most) < _room(self._stats, most):
            self._on_loop(self._notify_capacity)

    def _pass_on(self, outputs: Sequence[Output]) -> None:
        """Hands over outputs when that is due, or would be before the end of the next step if it takes as long."""
        self._outputs += outputs
        now_s = time.monotonic()
        step_s, self._passed_on_s = now_s - self._passed_on_s, now_s
        if now_s + step_s >= self._due_s or not self._engine.has_work():
            self._due_s = now_s + self._patience_s
            self._hand_over()
        elif urgent := {output.request_id for output in outputs if _is_urgent(output)}:
            self._hand_over(urgent)
            time.sleep(0)  # releases the GIL: otherwise the loop runs only when this thread waits

    def _hand_over(self, request_ids: Container[str] | None = None) -> None:
        """Hands over all outputs, or only those of some requests, which then need not wait for the others."""
        outputs, self._outputs = self._outputs, []
        if request_ids is not None:
            self._outputs = [output for output in outputs if output.request_id not in request_ids]
            outputs = [output for output in outputs if output.request_id in request_ids]
        if outputs:
            self._on_loop(self._deliver, outputs)

    def _take_inbox(self) -> bool:
        """Runs the event loop's commands; returns False once it asked the thread to end.

        Sleeps while there is nothing to do or the next step need not be planned yet, so that a request that comes in
        time is part of it.
        """
        while True:
            try:
                command = self._inbox.get(timeout=self._engine.slack_s() if self._engine.has_work() else None)
            except Empty:
                return True
            if command is None:
                return False
            command()

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        loop = self._running()[0]
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            active = self._active.get(output.request_id)
            if active is None:
                continue
            if output.finish_reason is not None:
                active.num_unfinished -= 1
                if not active.num_unfinished:
                    del self._active[output.request_id]
            active.sink(output)

    def _note_forgotten(self, _: Output) -> None:
        self._notify_capacity()  # callers that wait for the id, or for an idle engine, check again

    def _end(self, failure: BaseException | None) -> None:
        ended = self._running()[1]
        if failure is None:
            ended.set_result(None)
        else:
            ended.set_exception(failure)


def _room(stats: EngineStats, limit: int) -> int:
    return worth_trying(stats.num_waiting, stats.num_free_pages + stats.num_cached_pages, limit)


def _failed(request: Request, index: int, error: Exception) -> Output:
    return Output(
        request_id=request.id,
        index=index,
        offset=len(request.generated[index]) if request.generated else 0,
        token_ids=(),
        text="",
        finish_reason="error",
        error=failure_message(error),
        cause=error,
        num_prompt_tokens=len(request.prompt_token_ids),
    )


def _is_urgent(output: Output) -> bool:
    return (output.offset == 0 and output.prefill is None) or output.finish_reason is not None
