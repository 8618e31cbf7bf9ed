"""Runs requests on an engine in this process: does a worker's part and a client's, without a queue between them.

Requests and replies have the wire's form, so that limits, defaults, chunks and errors are the same as a client's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.engine.driver import DriverStopped, EngineDriver, StepEngine
from penstock.engine.errors import RequestError
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Output, Prefill
from penstock.producer.handle import ReplyStream
from penstock.producer.reading.assembly import Assembler
from penstock.protocol.errors import ReplyTimeout, RequestFailed, RequestRefused
from penstock.protocol.reply import Chunk
from penstock.protocol.wire import AnswerEntry, Call, ChunkEntry, EndEntry, FinishReason, GenerateRequest
from penstock.worker.calls.answering import Answers
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import EngineFailed
from penstock.worker.intake.admission import to_engine_request
from penstock.worker.intake.preparation import Preparation, Preparer
from penstock.worker.publish.chunks import chunk_entry, draft_fields, prefill_entry, stop_fields
from penstock.worker.run.choices import ChoiceBuffer, outcome_of

ENCODER_THREADS = 4  # a chat template renders in two processes at once; plain prompts need not wait for chats
HAND_OVER_S = 0.02  # how long outputs are batched: less than a reader notices, more than a step of a small model

_OF_WORKERS = {
    "keep_s": "replies in Redis",
    "tenant": "a worker's logs",
    "traceparent": "a worker's logs",
    "tracestate": "a worker's traces",
}

# A worker's limits guard against strangers. Here the caller limits itself.
NO_LIMITS = WorkerConfig(max_n=sys.maxsize, max_stop_strings=sys.maxsize, max_stop_chars=sys.maxsize)


class InProcessEngine:
    """Runs requests on one engine. Belongs to the event loop of `start`."""

    def __init__(self, engine: StepEngine, preparer: Preparer, defaults: GenerationDefaults) -> None:
        self.max_num_seqs = engine.max_num_seqs
        self._driver = EngineDriver(engine)
        self._driver.set_patience(HAND_OVER_S)
        self._preparer = preparer
        self._defaults = defaults
        self._answers = Answers(NO_LIMITS, preparer, preparer.text.vocab_size, defaults, self._driver.check)
        self._threads = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="penstock-tokenizer")
        self._runs: set[_Run] = set()
        self._left: dict[str, _Run] = {}  # by id: abandoned requests, which the engine is about to end
        self._failure: tuple[str, Exception | None] | None = None  # message and cause of EngineFailed, once it ended

    async def start(self) -> None:
        """Starts the engine's thread."""
        await self._driver.start()
        self._watch = asyncio.create_task(self._watch_driver(), name="watch")

    async def stop(self) -> None:
        """Ends running requests with EngineFailed, then the thread after its current step."""
        self._fail("the LLM is closed")
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._driver.stop()
        await self._watch

    def stream(self, request: GenerateRequest, *, timeout_s: float | None, whole: bool = False) -> ReplyStream:
        """Streams the chunks of a request, which starts with the iteration; leaving early ends it.

        Args:
            request: with an id.
            timeout_s: from the start to the end of the reply.
            whole: whether nobody looks at the chunks: then all text of a choice is one chunk.

        Raises (while iterating):
            RequestRefused: the request cannot be served.
            RequestFailed: it ended with an error, and the engine goes on.
            ReplyTimeout: it did not end within `timeout_s`.
            EngineFailed: the engine has ended.
        """
        assembler = Assembler(request.id or "")
        return ReplyStream(request.id or "", self._chunks(request, assembler, timeout_s, whole), assembler)

    async def ask(self, call: Call) -> AnswerEntry:
        """Answers a call from the model's tokenizer and limits; nothing is generated.

        Raises:
            RequestRefused: the request cannot be served.
            EngineFailed: the engine has ended.
        """
        self._check_running()
        _check_honoured(call.request)
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._threads, self._answers.to, call, time.time())
        except RequestError as error:
            raise RequestRefused(call.request.id, error.code, str(error)) from None
        except asyncio.CancelledError:
            self._check_running()  # `stop` cancels work that waits for its threads
            raise
        return AnswerEntry.model_validate({"id": call.request.id, "worker": "", **answer})

    # Everything needed comes as arguments rather than in a ReplyStream: see `penstock.producer.handle`.
    async def _chunks(
        self, request: GenerateRequest, assembler: Assembler, timeout_s: float | None, whole: bool
    ) -> AsyncGenerator[tuple[Chunk], None]:
        self._check_running()
        loop = asyncio.get_running_loop()
        run = _Run(request, whole, loop.time)
        self._runs.add(run)
        timers: list[asyncio.TimerHandle] = []
        if request.timeout_s is not None:
            timers.append(loop.call_later(request.timeout_s, self._expire, run))
        if timeout_s is not None:
            timers.append(loop.call_later(timeout_s, run.time_out, timeout_s))
        try:
            await self._admit(run)
            while not assembler.ended:
                await run.wait()
                self._check_running()
                for entry in run.take():
                    if (chunk := _fed(assembler, run, entry)) is not None:
                        yield (chunk,)
        finally:
            for timer in timers:
                timer.cancel()
            self._leave(run)

    async def _admit(self, run: _Run) -> None:
        """Brings a request to the engine, as `penstock.worker.intake.intake` does."""
        _check_honoured(run.request)
        try:
            preparation = await self._prepare(run.request)
            await self._wait_let_go(run.id)
            if run.is_expired:
                run.end("expired")
                return
            request = to_engine_request(run.request, preparation, self._defaults)
            self._driver.submit(request, lambda output: self._push(run, output))
        except RequestError as error:
            raise RequestRefused(run.id, error.code, str(error)) from None
        except asyncio.CancelledError:
            self._check_running()  # `stop` cancels work that waits for its threads
            raise
        except DriverStopped as error:
            self._check_running()
            raise EngineFailed("the engine has ended") from error  # just now: `_watch_driver` is about to say why
        except Exception as error:  # a failing text encoder concerns this request alone
            self._check_running()  # or the threads were closed by `stop`
            run.end("error", "internal_error", f"the request could not be prepared: {error!r}", error)
        else:
            run.submitted_s, run.ignored = run.now_s(), preparation.ignored

    async def _prepare(self, request: GenerateRequest) -> Preparation:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._preparer.prepare, request, time.time())

    def _expire(self, run: _Run) -> None:
        run.is_expired = True
        if run.submitted_s is not None:
            self._driver.abort(run.id, "expired")

    def _push(self, run: _Run, output: Output) -> None:
        run.push(output)
        if run.outcome is not None:
            self._left.pop(run.id, None)

    def _leave(self, run: _Run) -> None:
        """Abandons a request without waiting: the loop may already be running when a caller leaves."""
        self._runs.discard(run)
        if run.submitted_s is not None and run.outcome is None and self._failure is None:
            self._left[run.id] = run
            self._driver.abort(run.id)

    async def _wait_let_go(self, request_id: str) -> None:
        """Waits until the engine has dropped an abandoned request: its id may be used again."""
        while (left := self._left.get(request_id)) is not None:
            left.news.clear()
            await left.news.wait()
            self._check_running()

    async def _watch_driver(self) -> None:
        try:
            await self._driver.wait_ended()
        except Exception as error:
            self._fail(f"the engine has ended: {type(error).__name__}: {error}", error)

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        self._failure = self._failure or (message, cause)
        for run in (*self._runs, *self._left.values()):
            run.news.set()

    def _check_running(self) -> None:
        if self._failure is not None:
            message, cause = self._failure
            raise EngineFailed(message) from cause


@dataclass(eq=False, slots=True)
class _Run:
    """A request under way, with the output that is not yet taken."""

    request: GenerateRequest
    is_whole: bool  # output is taken only at the end
    now_s: Callable[[], float]
    choices: list[ChoiceBuffer] = field(init=False)
    started_s: float = field(init=False)
    prefill: Prefill | None = None  # how far the prompt is, not taken yet
    first_token_s: float | None = None
    ignored: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    submitted_s: float | None = None  # when the engine got it
    is_expired: bool = False
    error: tuple[str, str] | None = None  # code and message
    cause: Exception | None = None  # of the error
    timeout: ReplyTimeout | None = None  # set when the caller has stopped waiting
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.choices = [ChoiceBuffer(index) for index in range(self.request.n)]
        self.started_s = self.now_s()

    @property
    def id(self) -> str:
        return self.request.id or ""

    @property
    def outcome(self) -> FinishReason | None:
        """Why it ended, once it has."""
        return outcome_of(self.choices)

    def push(self, output: Output) -> None:
        if output.prefill is not None:
            self._note_prefill(output.prefill)
            return
        self.choices[output.index].add(output)
        self.prompt_tokens = output.num_prompt_tokens or self.prompt_tokens
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        if output.token_ids and self.first_token_s is None:
            self.first_token_s = self.now_s()
        if output.error is not None:
            self.error, self.cause = ("engine_error", output.error), output.cause
        if not self.is_whole or self.outcome is not None:
            self.news.set()

    def _note_prefill(self, prefill: Prefill) -> None:
        if not self.is_whole and self.first_token_s is None:
            self.prefill = max(prefill, self.prefill or prefill)
            self.news.set()

    def end(
        self, reason: FinishReason, code: str | None = None, message: str = "", cause: Exception | None = None
    ) -> None:
        """Ends a request that never reached the engine."""
        for choice in self.choices:
            choice.finish_reason = reason
        if code is not None:
            self.error, self.cause = (code, message), cause
        self.news.set()

    def time_out(self, timeout_s: float) -> None:
        self.timeout = ReplyTimeout(self.id, timeout_s)
        self.news.set()

    async def wait(self) -> None:
        """Waits until there may be something to take."""
        await self.news.wait()
        self.news.clear()
        if self.timeout is not None:
            raise self.timeout

    def take(self) -> Iterator[ChunkEntry | EndEntry]:
        """Yields the prompt's progress and the new output, as the worker's publisher would write them, then the end.

        Tokens without text wait for text, except at the end, so that readers never get an empty chunk.
        """
        if self.prefill is not None and self.first_token_s is None:
            yield prefill_entry(self.choices[0], self.prefill)
        self.prefill = None
        outcome = self.outcome
        for choice in self.choices:
            ends_now = choice.finish_reason is not None and not choice.is_closed
            if choice.pending.is_readable or (ends_now and (choice.pending.token_ids or self.request.n > 1)):
                yield self._chunk(choice)
            choice.is_closed |= ends_now
        if outcome is not None:
            yield self._end_entry(outcome)

    def _chunk(self, choice: ChoiceBuffer) -> ChunkEntry:
        pending = choice.take()
        entry = chunk_entry(choice, pending, num_choices=self.request.n)
        choice.num_published += len(pending.token_ids)
        return entry

    def _end_entry(self, outcome: FinishReason) -> EndEntry:
        code, message = self.error or (None, None)
        reasons = tuple(choice.finish_reason or outcome for choice in self.choices)
        return EndEntry(
            finish_reason=outcome,
            finish_reasons=reasons if len(reasons) > 1 else None,
            **(stop_fields(self.choices[0]) if len(reasons) == 1 else {}),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(choice.num_published for choice in self.choices),
            reasoning_tokens=sum(choice.num_reasoning for choice in self.choices) or None,
            **draft_fields(self.choices),
            queued_ms=self._ms_at(self.submitted_s),
            ttft_ms=self._ms_at(self.first_token_s),
            total_ms=self._ms_at(self.now_s()),
            ignored=self.ignored or None,
            code=code,
            message=message,
        )

    def _ms_at(self, time_s: float | None) -> int | None:
        return None if time_s is None else round((time_s - self.started_s) * 1000)


def _fed(assembler: Assembler, run: _Run, entry: ChunkEntry | EndEntry) -> Chunk | None:
    """Feeds an entry to the assembler; an error gets the engine's exception as cause. Entries have no id to continue
    from.
    """
    try:
        return assembler.feed("", entry)
    except RequestFailed as failed:
        raise failed from run.cause


def _check_honoured(request: GenerateRequest) -> None:
    for name, purpose in _OF_WORKERS.items():
        if (value := getattr(request, name)) is not None:
            message = f"{name} {value} is for {purpose}, and an engine without a queue has none"
            raise RequestRefused(request.id, "invalid_request", message)
