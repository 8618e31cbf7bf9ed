"""A request that was sent: follow its reply, wait for its end, cancel it, ask for its state."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from penstock.producer.arguments import check_wait
from penstock.producer.reading.assembly import Assembler
from penstock.producer.reading.subscription import Subscription
from penstock.producer.request import Prompt, build_request
from penstock.producer.row_ids import RowIds
from penstock.producer.transport import State, Transport
from penstock.protocol.errors import PenstockError, QueueFull, ReplyGone, ReplyTimeout, ServerRefused
from penstock.protocol.redis.streams import is_entry_id
from penstock.protocol.reply import Chunk, Prefill, Reply
from penstock.protocol.wire import GenerateRequest, ReplyEntry, Sampling, in_python

UNNAMED = "-"  # until a row's id is known, which depends on the checked request
MAX_EXPIRED_ATTEMPTS = 8
"""How often a row is sent again because its reply has expired. More only expire if Redis keeps no replies at all."""

T = TypeVar("T")
Send: TypeAlias = Callable[[GenerateRequest], Awaitable[None]]
"""Returns once the request has been sent and its reply can be followed."""


class ReplyStream:
    """Iterates over the chunks of one reply; ends with it, or raises what went wrong.

    Leaving the loop early stops reading when this object is garbage-collected; `async with` or `aclose` stop it at a
    known time.
    """

    def __init__(self, request_id: str, batches: AsyncGenerator[Sequence[Chunk], None], assembler: Assembler) -> None:
        self.request_id = request_id
        self._batches = batches
        self._ready: deque[Chunk] = deque()
        self._assembler = assembler

    @property
    def reply(self) -> Reply | None:
        """The whole reply, once the loop over the chunks has ended; None before."""
        return self._assembler.reply

    @property
    def has_ended(self) -> bool:
        """Whether the end of the reply was read, even if it is an error."""
        return self._assembler.ended

    @property
    def prefill(self) -> Prefill | None:
        """Progress of a long prompt, as its worker reports it about once a second; None before, and once tokens come.

        Look while another task waits for the next chunk, or have it told by `on_prefill`.
        """
        return self._assembler.prefill

    def on_prefill(self, tell: Callable[[Prefill], object]) -> None:
        """Calls `tell` with each new value of `prefill`, while the next chunk is awaited. It must not block."""
        self._assembler.tell_prefill = tell

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if not self._ready:
            self._ready.extend(await anext(self._batches))
        return self._ready.popleft()

    def batches(self) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yields the chunks as they arrive, those that arrived together as one batch. No batch is empty.

        Use it instead of iterating over the stream.
        """
        return self._batches

    async def read_to_end(self) -> Reply:
        """Reads the rest and returns the whole reply."""
        async with aclosing(self):
            async for _ in self:
                pass
        assert self.reply is not None  # noqa: S101  the chunks end with the reply or raise
        return self.reply

    async def aclose(self) -> None:
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class Handle:
    """A request by its queue and id. Any number of handles, in any process, may follow the same reply.

    A handle can be pickled: its id and queue are kept. Unpickled, it has no client; pass both to `AsyncClient.handle`.
    """

    def __init__(self, transport: Transport | None, queue: str, request_id: str) -> None:
        self.id = request_id
        self.queue = queue
        self._transport = transport  # None: it was unpickled

    def __repr__(self) -> str:
        return f"<Handle {self.id} in queue {self.queue!r}>"

    def stream(self, after: str | None = None, *, timeout: float | None = None) -> ReplyStream:
        """Streams the chunks of the reply from its beginning, or those that follow the entry `after`.

        Args:
            after: `entry_id` of the last chunk that was seen.
            timeout: seconds from now to the end of the reply.

        Raises:
            TypeError, ValueError: `after` is not an entry id, or `timeout` not a number of seconds.

        Raises (while iterating):
            RequestRefused, RequestFailed: the reply ends with an error.
            ReplyTimeout: it did not end within `timeout`; the request keeps running.
            UnknownRequest: nobody has sent the request.
            ReplyGone: it expired, or `after` is not an entry of it.
            ReplyCorrupt: tokens are missing or an entry is malformed.
            ConnectionLost, ServerRefused: Redis can't be read.
        """
        if not (after is None or isinstance(after, str)):
            raise TypeError(f"after must be a str, not {in_python(after)}")
        if after is not None and not is_entry_id(after):
            raise ValueError(f"after {in_python(after)} is not an entry id such as 1-5")
        assembler = Assembler(self.id)
        chunks = _attached(self._attachment(), self.queue, self.id, assembler, after, check_wait(timeout))
        return ReplyStream(self.id, chunks, assembler)

    async def result(self, timeout: float | None = None) -> Reply:  # noqa: ASYNC109  the name callers expect
        """Waits for the end and returns the whole reply. A cancelled or expired one is returned with its text so far.

        Raises what `stream` does.
        """
        return await self.stream(timeout=timeout).read_to_end()

    async def cancel(self) -> None:
        """Asks to stop generating; the reply then ends with `cancelled`, unless it ends by itself first."""
        await self._attachment().cancel(self.queue, self.id)

    async def state(self) -> State:
        """Returns `unknown` (nobody has sent it, see `UnknownRequest`), `queued`, `running`, `lost` (its worker is
        gone; another one will resume it) or `finished`.

        Raises:
            ReplyGone: it finished and its reply expired.
        """
        return await self._attachment().state(self.queue, self.id)

    def __reduce__(self) -> tuple[type[Handle], tuple[None, str, str]]:
        return Handle, (None, self.queue, self.id)

    def _attachment(self) -> Transport:
        if self._transport is None:
            pair = f"{in_python(self.id)}, queue={in_python(self.queue)}"
            raise RuntimeError(f"an unpickled handle has no client: follow it with client.handle({pair})")
        return self._transport


def send_and_follow(
    transport: Transport, prompt: Prompt, sampling: Sampling, *, send: Send, timeout_s: float | None
) -> ReplyStream:
    """Streams the reply to a request that is enqueued when iteration starts.

    A request that the caller gave no id is cancelled when iteration ends early, as nobody else can know its id.

    Raises:
        RequestRefused: an option is unknown or out of range.
    """
    fresh_id = transport.new_id()
    request = build_request(prompt, sampling, fresh_id=fresh_id)
    request_id = request.id or ""
    assembler = Assembler(request_id)
    follow = partial(_sent, transport, assembler=assembler, send=send, own=request_id == fresh_id, timeout_s=timeout_s)
    if (spans := transport.spans) is None:
        return ReplyStream(request_id, follow(request), assembler)
    chunks = spans.followed(transport.queue, request, spans.here(), follow, lambda: assembler.reply)
    return ReplyStream(request_id, chunks, assembler)


def row_reply(
    follow: Callable[[Prompt, Sampling], ReplyStream], prompt: Prompt, sampling: Sampling, ids: RowIds
) -> Awaitable[Reply]:
    """Names the next row of a job, and returns its reply. A reply of an earlier run is generated again if it expired.

    Raises:
        RequestRefused: an option is unknown or out of range.
        Whatever following raises; ReplyGone only if the replies to several attempts are gone.
    """
    request = build_request(prompt, sampling, fresh_id=UNNAMED)
    if not (isinstance(prompt, GenerateRequest) and prompt.id):
        request = request.model_copy(update={"id": ids.of(request)})
    return _row_reply(lambda named: follow(named, {}), request, ids)


async def _row_reply(follow: Callable[[GenerateRequest], ReplyStream], request: GenerateRequest, ids: RowIds) -> Reply:
    for _ in range(MAX_EXPIRED_ATTEMPTS):
        with suppress(ReplyGone):
            return await follow(request).read_to_end()
        request = request.model_copy(update={"id": ids.after(request.id or "")})
    return await follow(request).read_to_end()


# The generators below get what they need as arguments instead of a ReplyStream. Holding one would be a reference cycle:
# leaving a loop early would not end them before the garbage collector's next run.


async def _attached(
    transport: Transport,
    queue: str,
    request_id: str,
    assembler: Assembler,
    after: str | None,
    timeout_s: float | None,
) -> AsyncGenerator[Sequence[Chunk], None]:
    deadline = _Deadline(request_id, timeout_s)
    if after is None:
        await deadline.bound(transport.check_present(queue, request_id))
    else:
        await deadline.bound(_skip_to(transport, queue, request_id, assembler, after))
    subscription = transport.follow(queue, request_id, after or "0-0")
    try:
        following = _Following(subscription, assembler, deadline)
        while chunks := await following.next():
            yield chunks
    finally:
        subscription.close()


async def _skip_to(transport: Transport, queue: str, request_id: str, assembler: Assembler, after: str) -> None:
    """Reads the entries up to `after` again, so that what follows can be checked against them."""
    async for entry_id, entry in transport.history(queue, request_id, after):
        assembler.feed(entry_id, entry)


async def _sent(
    transport: Transport,
    request: GenerateRequest,
    assembler: Assembler,
    send: Send,
    own: bool,
    timeout_s: float | None,
) -> AsyncGenerator[Sequence[Chunk], None]:
    request_id = request.id or ""
    deadline = _Deadline(request_id, timeout_s)
    subscription = transport.follow(transport.queue, request_id)
    if own:
        transport.own(request_id)
    try:
        try:
            await deadline.bound(send(request))
        except (QueueFull, ServerRefused):
            transport.disown(request_id, cancel=False)
            raise
        if subscription.is_lost:  # reading gave up during an outage that sending waited out
            subscription = transport.follow(transport.queue, request_id)
        following = _Following(subscription, assembler, deadline)
        while chunks := await following.next():
            yield chunks
    finally:
        subscription.close()
        transport.disown(request_id, cancel=not assembler.ended)


class _Following:
    """A reply that is being followed."""

    def __init__(self, subscription: Subscription, assembler: Assembler, deadline: _Deadline) -> None:
        self._subscription = subscription
        self._assembler = assembler
        self._deadline = deadline
        self._error: PenstockError | None = None

    async def next(self) -> list[Chunk]:
        """Waits for at least one chunk and returns all that are there; an empty list at the end."""
        if self._error is not None:
            raise self._error
        chunks: list[Chunk] = []
        while not (chunks or self._assembler.ended):
            self._feed(chunks, await self._deadline.bound(self._subscription.next()))
        try:
            while self._subscription.has_chunk:
                self._feed(chunks, await self._subscription.next())
        except PenstockError as error:  # raised by the next call: what came before it is returned first
            self._error = error
        return chunks

    def _feed(self, chunks: list[Chunk], entry: tuple[str, ReplyEntry]) -> None:
        chunk = self._assembler.feed(*entry)
        if chunk is not None:
            chunks.append(chunk)


class _Deadline:
    """A moment on the event loop's clock after which waiting for a reply ends with ReplyTimeout."""

    def __init__(self, request_id: str, timeout_s: float | None) -> None:
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._when = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def bound(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        return awaitable if self._timeout_s is None else self._bound(awaitable, self._timeout_s)

    async def _bound(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout_at(self._when):
                return await awaitable
        except TimeoutError:
            raise ReplyTimeout(self._request_id, timeout_s) from None
