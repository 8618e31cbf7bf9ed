"""The blocking client: a thin layer over the asyncio client, which runs in a thread of its own."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from penstock.producer.aio import AsyncClient
from penstock.producer.arguments import check_wait
from penstock.producer.blocking.feed import drive
from penstock.producer.blocking.loop_thread import LoopThread
from penstock.producer.bulk import BulkResult, check_bulk
from penstock.producer.calls import DEFAULT_TIMEOUT_S
from penstock.producer.handle import Handle, ReplyStream
from penstock.producer.progress import ProgressCallback
from penstock.producer.request import Prompt
from penstock.producer.transport import State
from penstock.protocol.queue.status import QueueStatus
from penstock.protocol.reply import Chunk, Reply
from penstock.protocol.wire import ModelCard, Sampling

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Client:
    """`AsyncClient` for code that blocks; arguments and errors are the same. Any number of threads may share one.

    Use it in a `with` block, or `close` it. Ctrl-C during a call cancels what it waited for.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = "default",
        max_queue_length: int | None = 10_000,
        dedupe_window_s: int = 86_400,
        reconnect_timeout_s: float = 60.0,
        answer_timeout_s: float | None = None,
        durable: bool = False,
        tracing: bool | TracerProvider = False,
    ) -> None:
        self._client = AsyncClient(
            url,
            queue=queue,
            max_queue_length=max_queue_length,
            dedupe_window_s=dedupe_window_s,
            reconnect_timeout_s=reconnect_timeout_s,
            answer_timeout_s=answer_timeout_s,
            durable=durable,
            tracing=tracing,
        )
        self._loop = LoopThread("penstock-client")
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._client!r}>"

    def submit(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> BlockingHandle:
        """See `AsyncClient.submit`."""
        return BlockingHandle(self._loop, self._loop.call(self._client.submit(prompt, **sampling)))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]
    ) -> BlockingReplyStream:
        """See `AsyncClient.stream`."""
        return BlockingReplyStream(self._loop, self._client.stream(prompt, timeout=timeout, **sampling))

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]) -> Reply:
        """See `AsyncClient.generate`."""
        return self._loop.call(self._client.generate(prompt, timeout=timeout, **sampling))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        progress: bool | ProgressCallback = False,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[BulkResult]:
        """See `AsyncClient.map`. The prompts are read in the caller's thread; `progress` is called in the client's."""
        check_bulk(prompts, sampling, max_in_flight=max_in_flight, ordered=ordered, progress=progress)
        check_wait(timeout)
        return drive(
            self._loop,
            prompts,
            lambda feed: self._client.map(
                feed, max_in_flight=max_in_flight, ordered=ordered, progress=progress, timeout=timeout, **sampling
            ),
        )

    def handle(self, request_id: str, *, queue: str | None = None) -> BlockingHandle:
        """See `AsyncClient.handle`."""
        return BlockingHandle(self._loop, self._client.handle(request_id, queue=queue))

    def queue_status(self) -> QueueStatus:
        """See `AsyncClient.queue_status`."""
        return self._loop.call(self._client.queue_status())

    def count_tokens(self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]) -> int:
        """See `AsyncClient.count_tokens`."""
        return self._loop.call(self._client.count_tokens(prompt, timeout=timeout, **sampling))

    def tokenize(
        self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]
    ) -> tuple[int, ...]:
        """See `AsyncClient.tokenize`."""
        return self._loop.call(self._client.tokenize(prompt, timeout=timeout, **sampling))

    def detokenize(self, token_ids: Sequence[int], *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        """See `AsyncClient.detokenize`."""
        return self._loop.call(self._client.detokenize(token_ids, timeout=timeout))

    def validate(self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]) -> int:
        """See `AsyncClient.validate`."""
        return self._loop.call(self._client.validate(prompt, timeout=timeout, **sampling))

    def model_card(self, *, queue: str | None = None) -> ModelCard | None:
        """See `AsyncClient.model_card`."""
        return self._loop.call(self._client.model_card(queue=queue))

    def queues(self) -> tuple[str, ...]:
        """See `AsyncClient.queues`."""
        return self._loop.call(self._client.queues())

    def close(self) -> None:
        """See `AsyncClient.close`. Other threads that still wait get ConnectionLost. Harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingHandle:
    """`Handle` for code that blocks."""

    def __init__(self, loop: LoopThread, handle: Handle) -> None:
        self.id = handle.id
        self.queue = handle.queue
        self._loop = loop
        self._handle = handle

    def __repr__(self) -> str:
        return repr(self._handle)

    def stream(self, after: str | None = None, *, timeout: float | None = None) -> BlockingReplyStream:
        """See `Handle.stream`."""
        return BlockingReplyStream(self._loop, self._handle.stream(after, timeout=timeout))

    def result(self, timeout: float | None = None) -> Reply:
        """See `Handle.result`."""
        return self._loop.call(self._handle.result(timeout))

    def cancel(self) -> None:
        """See `Handle.cancel`."""
        self._loop.call(self._handle.cancel())

    def state(self) -> State:
        """See `Handle.state`."""
        return self._loop.call(self._handle.state())


class BlockingReplyStream:
    """`ReplyStream` for blocking code: a plain iterator of chunks, which stops reading when it is garbage-collected."""

    def __init__(self, loop: LoopThread, stream: ReplyStream) -> None:
        self.request_id = stream.request_id
        self._loop = loop
        self._stream = stream
        self._finalizer = weakref.finalize(self, loop.post, stream.aclose)

    @property
    def reply(self) -> Reply | None:
        """The whole reply, once the loop over the chunks ended; None before."""
        return self._stream.reply

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.call(_next_chunk(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Stops reading, and cancels the request if `Client.stream` made it. Harmless when repeated."""
        self._finalizer.detach()
        self._loop.call(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next_chunk(stream: ReplyStream) -> Chunk | None:
    return await anext(stream, None)


def _close(loop: LoopThread, client: AsyncClient) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was stopped before
        loop.call(client.close())
    loop.stop()
