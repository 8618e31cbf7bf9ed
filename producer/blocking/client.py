"""The blocking client: a thin layer over the asyncio client, which runs in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from penstock.producer.aio import AsyncClient, connections_of
from penstock.producer.arguments import check_wait
from penstock.producer.blocking.feed import drive
from penstock.producer.blocking.loop_thread import LoopThread
from penstock.producer.blocking.session import Session
from penstock.producer.bulk import BulkResult, check_bulk
from penstock.producer.calls import DEFAULT_TIMEOUT_S
from penstock.producer.environment import known_address
from penstock.producer.handle import Handle, ReplyStream
from penstock.producer.progress import ProgressCallback
from penstock.producer.request import Prompt
from penstock.producer.row_ids import RowIds, check_ids
from penstock.producer.transport import State
from penstock.protocol.queue.status import QueueStatus
from penstock.protocol.reply import Chunk, Prefill, Reply
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
        make = partial(
            AsyncClient,
            url,
            queue=queue,
            max_queue_length=max_queue_length,
            dedupe_window_s=dedupe_window_s,
            reconnect_timeout_s=reconnect_timeout_s,
            answer_timeout_s=answer_timeout_s,
            durable=durable,
            tracing=tracing,
        )
        self._session = Session(make)
        self._session.now()  # makes the client, which refuses invalid arguments

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._session!r}>"

    def submit(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> BlockingHandle:
        """See `AsyncClient.submit`."""
        handle = self._session.call(lambda client: client.submit(prompt, **sampling))
        return BlockingHandle(self._session, handle.queue, handle.id)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]
    ) -> BlockingReplyStream:
        """See `AsyncClient.stream`."""
        loop, client, _ = self._session.now()
        return BlockingReplyStream(loop, client.stream(prompt, timeout=timeout, **sampling))

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]) -> Reply:
        """See `AsyncClient.generate`."""
        return self._session.call(lambda client: client.generate(prompt, timeout=timeout, **sampling))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        progress: bool | ProgressCallback = False,
        timeout: float | None = None,
        ids: RowIds | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[BulkResult]:
        """See `AsyncClient.map`. The prompts are read in the caller's thread; `progress` is called in the client's."""
        check_bulk(prompts, sampling, max_in_flight=max_in_flight, ordered=ordered, progress=progress)
        check_wait(timeout)
        check_ids(ids)
        loop, client, _ = self._session.now()
        return drive(
            loop,
            prompts,
            lambda feed: client.map(
                feed,
                max_in_flight=max_in_flight,
                ordered=ordered,
                progress=progress,
                timeout=timeout,
                ids=ids,
                **sampling,
            ),
        )

    def handle(self, request_id: str, *, queue: str | None = None) -> BlockingHandle:
        """See `AsyncClient.handle`."""
        handle = self._session.now().client.handle(request_id, queue=queue)
        return BlockingHandle(self._session, handle.queue, handle.id)

    def queue_status(self) -> QueueStatus:
        """See `AsyncClient.queue_status`."""
        return self._session.call(lambda client: client.queue_status())

    def count_tokens(self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]) -> int:
        """See `AsyncClient.count_tokens`."""
        return self._session.call(lambda client: client.count_tokens(prompt, timeout=timeout, **sampling))

    def tokenize(
        self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]
    ) -> tuple[int, ...]:
        """See `AsyncClient.tokenize`."""
        return self._session.call(lambda client: client.tokenize(prompt, timeout=timeout, **sampling))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float = DEFAULT_TIMEOUT_S
    ) -> str:
        """See `AsyncClient.detokenize`."""
        return self._session.call(
            lambda client: client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, timeout=timeout)
        )

    def validate(self, prompt: Prompt, *, timeout: float = DEFAULT_TIMEOUT_S, **sampling: Unpack[Sampling]) -> int:
        """See `AsyncClient.validate`."""
        return self._session.call(lambda client: client.validate(prompt, timeout=timeout, **sampling))

    def model_card(self, *, queue: str | None = None) -> ModelCard | None:
        """See `AsyncClient.model_card`."""
        return self._session.call(lambda client: client.model_card(queue=queue))

    def queues(self) -> tuple[str, ...]:
        """See `AsyncClient.queues`."""
        return self._session.call(lambda client: client.queues())

    def close(self) -> None:
        """See `AsyncClient.close`. Other threads that still wait get ConnectionLost. Harmless when repeated."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingHandle:
    """`Handle` for code that blocks. Unpickled elsewhere, it connects by itself when it is first used."""

    def __init__(self, session: Session, queue: str, request_id: str) -> None:
        self.id = request_id
        self.queue = queue
        self._session = session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in queue {self.queue!r}>"

    def stream(self, after: str | None = None, *, timeout: float | None = None) -> BlockingReplyStream:
        """See `Handle.stream`."""
        loop, client, _ = self._session.now()
        return BlockingReplyStream(loop, self._on(client).stream(after, timeout=timeout))

    def result(self, timeout: float | None = None) -> Reply:
        """See `Handle.result`."""
        return self._session.call(lambda client: self._on(client).result(timeout))

    def cancel(self) -> None:
        """See `Handle.cancel`."""
        self._session.call(lambda client: self._on(client).cancel())

    def state(self) -> State:
        """See `Handle.state`."""
        return self._session.call(lambda client: self._on(client).state())

    def _on(self, client: AsyncClient) -> Handle:
        return client.handle(self.id, queue=self.queue)

    def __reduce__(self) -> tuple[Callable[[str, str, str], BlockingHandle], tuple[str, str, str]]:
        """Pickles the id, the queue and the address, without user and password."""
        return _unpickled, (str(connections_of(self._session.now().client).address), self.queue, self.id)


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

    @property
    def prefill(self) -> Prefill | None:
        """See `ReplyStream.prefill`. Any thread may look."""
        return self._stream.prefill

    def on_prefill(self, tell: Callable[[Prefill], object]) -> None:
        """See `ReplyStream.on_prefill`. `tell` is called in the client's thread."""
        self._stream.on_prefill(tell)

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


_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
"""The sessions of unpickled handles, by address."""


def _unpickled(address: str, queue: str, request_id: str) -> BlockingHandle:
    session = _sessions.get(address)
    if session is None:
        session = _sessions.setdefault(address, Session(lambda: AsyncClient(known_address(address))))
    return BlockingHandle(session, queue, request_id)


async def _next_chunk(stream: ReplyStream) -> Chunk | None:
    return await anext(stream, None)
