"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Iterable, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack
from weakref import WeakSet

from penstock.producer.arguments import check_flag, check_name, check_wait
from penstock.producer.bulk import BulkResult, check_bulk, run_bulk
from penstock.producer.calls import DEFAULT_TIMEOUT_S, check_timeout
from penstock.producer.connections import Connections
from penstock.producer.environment import address_from_environment
from penstock.producer.handle import Handle, ReplyStream, row_reply, send_and_follow
from penstock.producer.patience import Patience
from penstock.producer.progress import ProgressCallback
from penstock.producer.request import Prompt, build_request, request_of_tokens
from penstock.producer.row_ids import RowIds, check_ids
from penstock.producer.transport import Transport
from penstock.protocol.errors import ConnectionLost
from penstock.protocol.queue.status import QueueStatus
from penstock.protocol.redis.address import Address
from penstock.protocol.reply import Reply
from penstock.protocol.telemetry.loading import client_spans
from penstock.protocol.wire import AnswerEntry, CallName, GenerateRequest, ModelCard, Sampling

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

MAX_OTHERS = 64  # how many clients of other queues `AsyncClient.on` keeps while they are idle


def connections_of(client: AsyncClient) -> Connections:
    """Returns the Redis connections of a client, for our own servers that are clients."""
    return client._transport.connections  # noqa: SLF001


class AsyncClient:
    """Sends requests to one queue and reads their replies, all over one blocking connection.

    Use it with `async with`, or `close` it. It connects on first use and survives reconnects. Not for use from several
    threads or event loops; use `Client` there.

    Args:
        url: where Redis is (`penstock.protocol.redis.address.parse_url`, or what it returns); the default is the
            environment's PENSTOCK_REDIS_URL, then its REDIS_URL, then `redis://localhost:6379`.
        queue: the queue's name.
        max_queue_length: QueueFull is raised at this many waiting and running requests, and for a request that would
            probably exceed its `timeout_s` in the queue; None: never.
        dedupe_window_s: how long a request id is remembered, so that sending it again adds no second request.
        reconnect_timeout_s: how long Redis may stay away before waits for a reply raise ConnectionLost.
        answer_timeout_s: how long a command to Redis may stay unanswered before it raises ConnectionLost; None: several
            tries of 10 s each, if Redis accepts commands and answers none.
        durable: enqueueing returns once the request is on the server's disk (WAITAOF), which takes a second at most
            under `appendfsync everysec`. If the server can't confirm that, ServerRefused is raised and nothing is sent.
        tracing: whether to record requests as OpenTelemetry spans, whose traces continue in workers. True uses the
            provider that the application has set up; a provider can also be given. It needs the extra `otel`.

    Raises:
        BadAddress: the URL, or a file that it names, can't be used.
        TelemetryUnavailable: `tracing` without the extra.
        TypeError, ValueError: another argument has the wrong type or is out of range. This holds for all methods.
    """

    def __init__(
        self,
        url: str | Address | None = None,
        *,
        queue: str = "default",
        max_queue_length: int | None = 10_000,
        dedupe_window_s: int = 86_400,
        reconnect_timeout_s: float = 60.0,
        answer_timeout_s: float | None = None,
        durable: bool = False,
        tracing: bool | TracerProvider = False,
    ) -> None:
        self._connections: Connections | None = Connections(
            address_from_environment() if url is None else url,
            reconnect_timeout_s=reconnect_timeout_s,
            answer_timeout_s=answer_timeout_s,
        )
        self._transport = Transport(
            self._connections,
            queue=queue,
            max_queue_length=max_queue_length,
            dedupe_window_s=dedupe_window_s,
            is_durable=durable,
            spans=client_spans(tracing),
        )
        self._transports = WeakSet({self._transport})  # of all queues, to be closed
        self._others: dict[str, Self] = {}  # in order of use, the most recent one last

    def __repr__(self) -> str:
        return f"<{type(self).__name__} queue {self._transport.queue!r} at {self._transport.address}>"

    def on(self, queue: str) -> Self:
        """Returns a client of another queue that shares this one's connections and settings and is closed with it.

        Raises:
            ValueError: the queue could not be one.
        """
        if check_name("queue", queue) == self._transport.queue:
            return self
        other = self._others.pop(queue, None)
        if other is None:
            transport = self._transport.beside(queue)
            self._transports.add(transport)
            other = copy(self)
            vars(other).update(_transport=transport, _connections=None)  # `other` must not close shared connections
            self._forget_idle()
        self._others[queue] = other
        return other

    def _forget_idle(self) -> None:
        """Drops clients of idle queues, so that they do not pile up as queues come and go. `on` makes them again."""
        idle = [queue for queue, other in self._others.items() if other._transport.is_idle]  # noqa: SLF001
        for queue in idle[: 1 - MAX_OTHERS]:
            del self._others[queue]

    async def submit(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Handle:
        """Enqueues a request and returns at once. Sending the same `id` again returns a handle on the same reply.

        Args:
            prompt: text, token ids, chat messages, or a GenerateRequest.
            sampling: `max_tokens`, `temperature`, `stop`, ...: the fields of GenerateRequest.

        Raises:
            RequestRefused: an option is unknown or out of range; nothing was sent.
            ReplyGone: the `id` was sent before, within `dedupe_window_s`, and its reply has expired; nothing was sent.
            QueueFull: the queue holds its limit, or the request would expire before its turn; nothing was sent.
            ConnectionLost, ServerRefused: Redis is away or refuses.
            RuntimeError: another event loop used this client first.
            NotDurable: with `durable`, the request was sent, but nobody knows whether a crash of Redis would lose it.
        """
        request = build_request(prompt, sampling, fresh_id=self._transport.new_id())
        await self._transport.send(request)
        return self.handle(request.id or "")

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **sampling: Unpack[Sampling]) -> ReplyStream:
        """Enqueues a request when iteration starts, and iterates over the chunks of its reply.

        Leaving the loop early cancels the request, unless the caller gave it an `id`: others may then wait for it too.

        Raises:
            RequestRefused: as `submit`.

        Raises (while iterating):
            Whatever else `submit` and `Handle.stream` raise.
        """
        transport = self._transport
        return send_and_follow(transport, prompt, sampling, send=transport.send, timeout_s=check_wait(timeout))

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  the name callers expect
        **sampling: Unpack[Sampling],
    ) -> Reply:
        """Enqueues a request and waits for the whole reply. Giving up waiting cancels it, as with `stream`.

        It raises whatever `submit` and `Handle.result` raise.
        """
        return await self.stream(prompt, timeout=timeout, **sampling).read_to_end()

    def map(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        progress: bool | ProgressCallback = False,
        timeout: float | None = None,
        ids: RowIds | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[BulkResult, None]:
        """Generates for many prompts, at most `max_in_flight` at a time, and waits while the queue does not accept
        them.

        It waits while the queue is full, and while Redis refuses for a temporary reason (`ServerRefused` with
        `is_passing`), without limit except `timeout`. While Redis is away it waits for `reconnect_timeout_s`.

        One result comes for each prompt, with a `reply` or an `error`: a prompt that fails does not end the others.
        Leaving the loop early cancels what is in flight.

        Args:
            prompts: read only as far ahead as needed.
            max_in_flight: how many requests may be waiting or running.
            ordered: whether results come in the order of the prompts, or as they complete.
            progress: True shows a bar on stderr; a function is called with a BulkProgress after each change.
            timeout: seconds for each prompt, from when it is first sent to the end of its reply; None: no limit.
            ids: names the requests, so that a program that was killed goes on: run again, it gets the replies that
                are kept, joins the requests that wait or run, and pays for the rest. Then leaving the loop early
                cancels nothing.
            sampling: the same options for all prompts.

        Raises:
            RequestRefused: an option is unknown or out of range, whatever the prompt.
            ValueError: `max_in_flight` is below 1, or `sampling` holds an `id`.

        Raises (while iterating):
            ConnectionLost: this client has never reached Redis, and could not within 5 s. There are no results then.
            TypeError: a prompt is a GenerateRequest, and there are also options.
        """
        check_bulk(prompts, sampling, max_in_flight=max_in_flight, ordered=ordered, progress=progress)
        timeout_s = check_wait(timeout)
        check_ids(ids)
        transport = self._transport
        patience = Patience(transport.connections)
        send = partial(transport.send_with_patience, patience)

        def follow(prompt: Prompt, sampling: Sampling) -> ReplyStream:
            return send_and_follow(transport, prompt, sampling, send=send, timeout_s=timeout_s)

        def generate(prompt: Prompt, sampling: Sampling) -> Awaitable[Reply]:
            return follow(prompt, sampling).read_to_end() if ids is None else row_reply(follow, prompt, sampling, ids)

        return run_bulk(
            generate,
            prompts,
            sampling,
            max_in_flight=max_in_flight,
            ordered=ordered,
            progress=progress,
            is_hopeless=lambda error: isinstance(error, ConnectionLost) and patience.is_hopeless,
        )

    def handle(self, request_id: str, *, queue: str | None = None) -> Handle:
        """Returns a handle on a request that was sent before, by any process.

        Args:
            request_id: its id, which belongs to its queue: the same id in another queue is another request.
            queue: where it was sent; this client's own queue by default. Replies of all queues are read over the
                same connection.

        Raises:
            ValueError: the id or the queue could not be one.
        """
        check_name("request_id", request_id)
        if queue is not None:
            check_name("queue", queue)
        return Handle(self._transport, queue or self._transport.queue, request_id)

    async def queue_status(self) -> QueueStatus:
        """Returns whether any worker serves the queue now, and how many requests are in it.

        A request that is sent to a queue without workers waits for one. The logger `penstock.producer` then says so,
        once, as a warning.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        return await self._transport.status()

    async def count_tokens(
        self,
        prompt: Prompt,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,  # noqa: ASYNC109  the name callers expect
        **sampling: Unpack[Sampling],
    ) -> int:
        """Counts the tokens of a prompt, even if it is too long to run. A chat is rendered by the model's template.

        A worker answers this while it generates, even when it is full.

        Raises:
            RequestRefused: the request can't be read, or the chat template refuses it.
            CallTimedOut: no worker answered within `timeout` seconds.
            CallFailed: a worker failed while it answered the call.
            QueueFull: too many calls wait.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        answer = await self._call("count_tokens", prompt, sampling, timeout)
        return answer.prompt_tokens or 0

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,  # noqa: ASYNC109
        **sampling: Unpack[Sampling],
    ) -> tuple[int, ...]:
        """Returns the tokens of a prompt, including those that the model's tokenizer or template adds. Raises as
        `count_tokens`.
        """
        answer = await self._call("tokenize", prompt, sampling, timeout)
        return answer.tokens or ()

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout: float = DEFAULT_TIMEOUT_S,  # noqa: ASYNC109
    ) -> str:
        """Returns the text of tokens. Special tokens are left out, or else spelled out. Raises as `count_tokens`."""
        skips = check_flag("skip_special_tokens", skip_special_tokens)
        request = request_of_tokens(token_ids, fresh_id=self._transport.new_id(), skip_special_tokens=skips)
        timeout_s = check_timeout(timeout)
        if not request.prompt_token_ids:
            return ""
        answer = await self._ask("detokenize", request, timeout_s)
        return answer.text or ""

    async def validate(
        self,
        prompt: Prompt,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,  # noqa: ASYNC109
        **sampling: Unpack[Sampling],
    ) -> int:
        """Checks whether a worker would take this request: it does everything that comes before generating.

        Returns:
            The number of tokens of the prompt.

        Raises:
            RequestRefused: the worker would refuse it, with this reason. Otherwise raises as `count_tokens`.
        """
        answer = await self._call("validate", prompt, sampling, timeout)
        return answer.prompt_tokens or 0

    async def model_card(self, *, queue: str | None = None) -> ModelCard | None:
        """Returns the card of the model that a queue's workers serve; None if no worker serves the queue.

        The default is this client's own queue.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
            ValueError: the queue could not be one.
        """
        if queue is not None:
            check_name("queue", queue)
        return await self._transport.card(queue or self._transport.queue)

    async def queues(self) -> tuple[str, ...]:
        """Returns the names of the queues that are served now. One whose workers all died counts until their heartbeats
        lapse.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        return await self._transport.queues()

    async def _call(self, name: CallName, prompt: Prompt, sampling: Sampling, timeout_s: float) -> AnswerEntry:
        request = build_request(prompt, sampling, fresh_id=self._transport.new_id())
        return await self._ask(name, request, check_timeout(timeout_s))

    async def _ask(self, name: CallName, request: GenerateRequest, timeout_s: float) -> AnswerEntry:
        self._transport.connections.check_loop()
        return await self._transport.caller.call(name, request.to_entry(), timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes all connections, and cancels what `stream`, `generate` and `map` still have in flight.

        Raises:
            RuntimeError: another event loop, which still runs, used it first.
        """
        if self._transport.connections.went_with_its_loop:
            return
        self._transport.connections.check_loop()
        await self._transport.close()
        if self._connections is not None:
            await asyncio.gather(*(each.close() for each in self._transports if each is not self._transport))
            await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
