"""`penstock.LLM`: a model in this process, without a queue, for a notebook or a batch script."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack, cast, overload

from penstock.engine import Engine, EngineConfig
from penstock.engine.driver import StepEngine
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.progress import BYTES, ReportProgress
from penstock.local.asking import Asking
from penstock.local.engine_options import EngineOptions, engine_config
from penstock.local.in_process import NO_LIMITS, InProcessEngine
from penstock.producer.arguments import check_wait
from penstock.producer.blocking.client import BlockingReplyStream
from penstock.producer.blocking.feed import drive
from penstock.producer.blocking.loop_thread import LoopThread
from penstock.producer.bulk import BulkResult, check_bulk, run_bulk
from penstock.producer.handle import ReplyStream
from penstock.producer.progress import ProgressCallback, has_viewer
from penstock.producer.request import Prompt, build_request
from penstock.protocol.ids import new_id
from penstock.protocol.reply import Chunk, Reply
from penstock.protocol.wire import AnswerEntry, Call, GenerateRequest, Message, Sampling
from penstock.worker.errors import EngineFailed
from penstock.worker.intake.preparation import Grammars, Preparer, TextEncoder

Chat: TypeAlias = Sequence[Message | Mapping[str, Any]]
"""One conversation."""

Prompts: TypeAlias = (
    list[str]
    | tuple[str, ...]
    | Sequence[Sequence[int]]
    | Sequence[Chat]
    | Sequence[GenerateRequest]
    | list[Prompt]
    | Iterator[Prompt]
)
"""Many prompts; a plain `str` is one."""

_Shown: TypeAlias = Callable[[str, str], AbstractContextManager[ReportProgress | None]]

AHEAD = 2  # times max_num_seqs: running requests, and as many that wait for a batch slot


class LLM(Asking):
    """A model with an engine of its own. Arguments, replies and errors are those of `penstock.Client`.

    Use it in a `with` block, or `close` it. Any number of threads may share one; their requests run together. Ctrl-C
    during a call ends what it waited for, and the LLM stays usable. A request without a seed draws other tokens each
    time.

    Args:
        model: a folder with a Hugging Face checkpoint, a hub id, or `demo`.
        progress: whether a terminal shows the progress of loading.
        options: `dtype`, `max_num_seqs`, `kv_cache_bytes`, ...: the engine settings of a worker, taken only from here,
            not from the environment or `penstock.toml`.

    Raises:
        ConfigError: an option is unknown or out of range, or the model is not supported.
        CheckpointError: the model's files are missing or have wrong contents.
    """

    def __init__(self, model: str | Path, *, progress: bool = True, **options: Unpack[EngineOptions]) -> None:
        engine = _load(model, engine_config(options), _bar if progress and _is_terminal() else _no_bar)
        preparer = Preparer(engine.tokenizer, NO_LIMITS, engine.grammars, engine.describe().max_model_len)
        self._start(engine, preparer, engine.defaults, str(model))

    @classmethod
    def from_engine(
        cls, engine: StepEngine, text: TextEncoder, defaults: GenerationDefaults, grammars: Grammars | None = None
    ) -> Self:
        """Makes an LLM from a loaded engine, which the caller must not use afterwards. Grammars are its
        `Engine.grammars`.
        """
        llm = cls.__new__(cls)
        preparer = Preparer(text, NO_LIMITS, grammars)
        llm._start(engine, preparer, defaults, type(engine).__name__)  # noqa: SLF001  an instance of this class
        return llm

    def _start(self, engine: StepEngine, preparer: Preparer, defaults: GenerationDefaults, name: str) -> None:
        if defaults.ignored:
            fields = ", ".join(defaults.ignored)
            warnings.warn(
                f"generation_config.json of {name} sets fields that are not supported: {fields}", stacklevel=3
            )
        self._name = name
        self._loop = LoopThread("penstock-llm")
        local = InProcessEngine(engine, preparer, defaults)
        self._loop.call(local.start())
        self._local: InProcessEngine | None = local
        self._finalizer = weakref.finalize(self, _close, self._loop, local)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | Chat | GenerateRequest,
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[BulkResult]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply | list[BulkResult]:
        """Continues one prompt, or many.

        One prompt (text, token ids, chat messages or a GenerateRequest) returns its Reply, and raises any error. A list
        of prompts returns a list of results in the same order, each with a `reply` or an `error`, as `Client.map` does:
        a prompt that fails does not end the others, and `result.text` raises its error.

        Args:
            prompts: one or many.
            progress: whether a terminal shows a bar, for many; a function is called with a BulkProgress.
            timeout: seconds for each reply, from its start.
            sampling: `max_tokens`, `temperature`, `stop`, ...: the fields of GenerateRequest. The same for all prompts;
                GenerateRequests bring their own.

        Raises:
            RequestRefused: an option is unknown or out of range, or the one prompt cannot be served.
            RequestFailed: generating for the one prompt ended in an error.
            ReplyTimeout: the one reply did not end within `timeout`.
            EngineFailed: the engine has ended, or the LLM is closed.
        """
        if _is_one(prompts):
            stream = _begun(self._open(), cast("Prompt", prompts), sampling, timeout, whole=True)
            with _told_of_closing():
                return self._loop.call(stream.read_to_end())
        limit = self._limit(None)
        check_bulk(prompts, sampling, max_in_flight=limit, ordered=False, progress=progress)
        check_wait(timeout)
        many = list(cast("Iterable[Prompt]", prompts))
        shown = progress if callable(progress) else progress and has_viewer()
        results = self._bulk(many, sampling, limit, timeout, ordered=False, progress=shown)
        with _told_of_closing():
            return sorted(self._loop.call(_collected(results)), key=lambda result: result.index)

    @overload
    def chat(
        self,
        messages: Chat,
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply: ...

    @overload
    def chat(
        self,
        messages: Sequence[Chat],
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[BulkResult]: ...

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        *,
        progress: bool | ProgressCallback = True,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply | list[BulkResult]:
        """Answers one conversation, or each of many, with the model's chat template. Otherwise like `generate`."""
        for chat in [messages] if _is_one(messages) else messages:
            if not _is_chat(chat):
                raise TypeError(f"a chat is a list of messages with `role` and `content`, not {chat!r:.80}")
        return self.generate(cast("list[Prompt]", messages), progress=progress, timeout=timeout, **sampling)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]
    ) -> BlockingReplyStream:
        """Iterates over the chunks of one reply as they are generated; afterwards, `reply` has the whole of it.

        The request starts with the iteration. Leaving the loop early ends it. Chunks have no `entry_id`: there is
        nothing to continue from.

        Raises:
            RequestRefused: an option is unknown or out of range. Iterating raises what `generate` raises.
        """
        if not _is_one(prompt):
            raise TypeError(f"stream takes one prompt, not {prompt!r:.80}; generate and map take many")
        return _Stream(self, self._loop, _begun(self._open(), prompt, sampling, timeout, whole=False))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        max_in_flight: int | None = None,
        ordered: bool = True,
        progress: bool | ProgressCallback = False,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[BulkResult]:
        """Generates like `generate` for many prompts, but yields results as they come: for more prompts than fit in
        memory.

        See `Client.map`. `max_in_flight` is by default enough to keep the engine busy.
        """
        limit = self._limit(max_in_flight)
        check_bulk(prompts, sampling, max_in_flight=limit, ordered=ordered, progress=progress)
        check_wait(timeout)
        return _told(
            drive(
                self._loop,
                prompts,
                lambda feed: self._bulk(feed, sampling, limit, timeout, ordered=ordered, progress=progress),
            )
        )

    def close(self) -> None:
        """Ends what still runs and releases the model. Calling it again does no harm."""
        self._finalizer()
        self._local = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _bulk(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        sampling: Sampling,
        max_in_flight: int,
        timeout_s: float | None,
        *,
        ordered: bool,
        progress: bool | ProgressCallback,
    ) -> AsyncGenerator[BulkResult, None]:
        local = self._open()

        def generate(prompt: Prompt, sampling: Sampling) -> Awaitable[Reply]:
            return _begun(local, prompt, sampling, timeout_s, whole=True).read_to_end()

        return run_bulk(generate, prompts, sampling, max_in_flight=max_in_flight, ordered=ordered, progress=progress)

    def _limit(self, max_in_flight: int | None) -> int:
        return AHEAD * self._open().max_num_seqs if max_in_flight is None else max_in_flight

    def _ask(self, call: Call) -> AnswerEntry:
        with _told_of_closing():
            return self._loop.call(self._open().ask(call))

    def _open(self) -> InProcessEngine:
        if self._local is None:
            raise EngineFailed("the LLM is closed")
        return self._local


class _Stream(BlockingReplyStream):
    """Keeps its LLM alive while it is read."""

    def __init__(self, llm: LLM, loop: LoopThread, stream: ReplyStream) -> None:
        super().__init__(loop, stream)
        self._llm = llm

    def __next__(self) -> Chunk:
        with _told_of_closing():
            return super().__next__()


def _load(model: str | Path, config: EngineConfig, shown: _Shown) -> Engine:
    with shown("loading the model", BYTES) as report:
        engine = Engine.from_checkpoint(model, config, report)
    with shown("warming up", "shapes") as report:
        engine.warm_up(report)
    return engine


def _bar(title: str, unit: str) -> AbstractContextManager[ReportProgress]:
    from penstock.local.progress import shown  # only a terminal needs it, and it imports the command line

    return shown(title, unit)


def _no_bar(title: str, unit: str) -> AbstractContextManager[None]:
    return nullcontext()


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _begun(
    local: InProcessEngine, prompt: Prompt, sampling: Sampling, timeout_s: float | None, *, whole: bool
) -> ReplyStream:
    request = build_request(prompt, sampling, fresh_id=new_id())
    return local.stream(request, timeout_s=check_wait(timeout_s), whole=whole)


def _told(results: Iterator[BulkResult]) -> Iterator[BulkResult]:
    with _told_of_closing():
        yield from results


async def _collected(results: AsyncGenerator[BulkResult, None]) -> list[BulkResult]:
    async with aclosing(results):
        return [result async for result in results]


def _is_one(prompts: object) -> bool:
    """Checks whether this is a single prompt. An empty list is not one.

    Raises:
        TypeError: it is neither one prompt nor many.
    """
    if isinstance(prompts, str | GenerateRequest):
        return True
    if isinstance(prompts, Sequence):
        return len(prompts) > 0 and isinstance(prompts[0], int | Message | Mapping)
    if isinstance(prompts, Iterable) and not isinstance(prompts, Message | Mapping):
        return False
    raise TypeError(f"a prompt is text, token ids, a list of messages or a GenerateRequest, not {prompts!r:.80}")


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Message | Mapping)


@contextmanager
def _told_of_closing() -> Iterator[None]:
    """Raises EngineFailed for a caller that still waits when the loop stops, such as for a prompt to be encoded."""
    try:
        yield
    except CancelledError:
        raise EngineFailed("the LLM is closed") from None


def _close(loop: LoopThread, local: InProcessEngine) -> None:
    with suppress(RuntimeError):  # the loop was already stopped
        loop.call(local.stop())
    loop.stop()
