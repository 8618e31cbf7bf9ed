"""Requests to the queue on behalf of HTTP clients."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from penstock.gateway.admission.admission import Meter, OutgoingRequest, for_tenant, metered
from penstock.gateway.admission.request_ids import request_id_of
from penstock.gateway.context import Gateway, gateway_of
from penstock.gateway.errors import overdue
from penstock.gateway.generation.idempotency import check_same, key_of, place_asked_for
from penstock.gateway.generation.resuming import check_can_go_on
from penstock.gateway.http.carried_trace import TRACE_STATE, carried_trace
from penstock.gateway.http.disconnect import while_asked
from penstock.gateway.http.events import BEFORE_ALL, EventWriter, Place, ServerSentEvent
from penstock.gateway.http.interruptions import interruption_of
from penstock.gateway.http.passed_over import pass_over_unshown
from penstock.gateway.http.streaming import EventStream
from penstock.producer import Chunk, GenerateRequest, PenstockError, Reply, ReplyStream

EXPIRY_GRACE_S = 10.0
"""Time beyond a request's `timeout_s` for its worker to report the expiry and the text so far."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its reply. It is enqueued once somebody reads the reply, unless that continues after a place."""

    queue: str
    reply: ReplyStream
    meter: Meter
    after: Place = BEFORE_ALL  # a stream continues after it
    timeout_s: float | None = None  # the request's own, from when Redis accepted it

    @property
    def id(self) -> str:
        return self.reply.request_id

    async def whole(self, asked: Request, each: Callable[[Chunk], object] | None = None) -> Reply:
        """Returns the reply, once it has ended. `each` gets its chunks as they arrive.

        Raises:
            ClientGone: the client has gone; a request that nobody else knows of is cancelled.
            ApiError: the answer was interrupted.
            Whatever `ReplyStream` raises.
        """
        try:
            with self._attended(asked):
                reply = await while_asked(asked, read_whole(self.reply, self.meter.counting(each)))
        except PenstockError as error:
            self.meter.failed(error)
            raise
        self.meter.ended(reply)
        return reply

    def streamed(
        self, asked: Request, writer: EventWriter, opening: Callable[[], Iterable[ServerSentEvent | None]] | None = None
    ) -> EventStream:
        """Streams the reply as events while it is written; `opening` returns events that come before its first."""
        gateway = gateway_of(asked)
        return EventStream(
            self.reply,
            self.meter.counted(writer),
            reading=self._attended(asked),
            interruption=interruption_of(asked),
            told=self.meter.told(gateway.standing.told),
            commit_after_s=gateway.settings.commit_after_s,
            ping_interval_s=gateway.settings.ping_interval_s,
            after=self.after,
            opening=opening,
        )

    @contextmanager
    def _attended(self, asked: Request) -> Iterator[None]:
        """Marks the reply as read during the block, but for no longer than the request may take: a worker that could
        end it may be gone.
        """
        with gateway_of(asked).watch.reading(self.queue, self.reply):
            if self.timeout_s is None:
                yield
                return
            end = partial(interruption_of(asked).end, overdue(self.timeout_s))
            timer = asyncio.get_running_loop().call_later(self.timeout_s + EXPIRY_GRACE_S, end)
            try:
                yield
            finally:
                timer.cancel()


async def start(asked: Request, queue: str, *requests: GenerateRequest) -> list[Job]:
    """Returns a job for each request, for the caller and for its API key's tenant.

    Without an Idempotency-Key they end when the client leaves. With one, all requests with that key share them, and
    they end once nobody has read them for a while.

    Raises:
        ApiError: the key or the Last-Event-ID can't be used, the key belongs to another request, or the caller's API
            key is at its limit of tokens or of requests at once.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    gateway = gateway_of(asked)
    asked.state.sent_to = queue, gateway.directory.model_of(queue)  # for the metrics
    pass_over_unshown(gateway.directory.last_card_of(queue), requests)
    key = key_of(asked)
    after = place_asked_for(asked, key)
    ready = [for_tenant(asked, _traced(asked, request)) for request in requests]
    if key is not None:
        numbered = enumerate(ready)
        ready = [await _named(asked, queue, each, key, after, number, len(requests)) for number, each in numbered]
    replies = [_reply(gateway, queue, request, after) for request in ready]
    sent = [
        OutgoingRequest(queue, reply.request_id, request, is_shared=key is not None)
        for request, reply in zip(ready, replies, strict=True)
    ]
    meters = await metered(asked, sent)
    return [
        Job(queue, reply, meter, after, request.timeout_s)
        for request, reply, meter in zip(ready, replies, meters, strict=True)
    ]


async def named(asked: Request, queue: str, request: GenerateRequest) -> tuple[GenerateRequest, Meter]:
    """Returns the request with an id: that of its Idempotency-Key, or a fresh one. So it can be recorded before it is
    sent.

    Its job (`job_of`) continues when the client leaves: the creator must end it.

    Raises:
        As `start`.
    """
    gateway, request = gateway_of(asked), for_tenant(asked, _traced(asked, request))
    asked.state.sent_to = queue, gateway.directory.model_of(queue)  # for the metrics
    pass_over_unshown(gateway.directory.last_card_of(queue), [request])
    key = key_of(asked)
    after = place_asked_for(asked, key)
    if key is not None:
        request = await _named(asked, queue, request, key, after)
    else:
        is_cluster = gateway.store.address.kind == "cluster"
        fresh_id = request_id_of(asked, secrets.token_urlsafe(), 0, is_cluster=is_cluster)
        request = request.model_copy(update={"id": fresh_id})
    [meter] = await metered(asked, [OutgoingRequest(queue, request.id or "", request, is_shared=key is not None)])
    return request, meter


def job_of(asked: Request, queue: str, request: GenerateRequest, meter: Meter) -> Job:
    """Returns the job of a request from `named`; it continues after the Last-Event-ID of the HTTP request."""
    after = place_asked_for(asked, key_of(asked))
    return Job(queue, _reply(gateway_of(asked), queue, request, after), meter, after, request.timeout_s)


def _reply(gateway: Gateway, queue: str, request: GenerateRequest, after: Place) -> ReplyStream:
    if after == BEFORE_ALL:
        return gateway.client.on(queue).stream(request)
    return gateway.client.handle(request.id or "", queue=queue).stream()


def _traced(asked: Request, request: GenerateRequest) -> GenerateRequest:
    """Adds the client's trace, if it names one. An invalid header is ignored, as W3C specifies."""
    trace = getattr(asked.state, TRACE_STATE, None) or carried_trace(asked.headers)
    return request.model_copy(update=trace) if trace else request


async def read_whole(reply: ReplyStream, each: Callable[[Chunk], object] | None = None) -> Reply:
    """Returns the reply, once it has ended. `each` gets its chunks as they arrive."""
    if each is not None:
        async with aclosing(reply):
            async for chunk in reply:
                each(chunk)
    return await reply.read_to_end()


async def _named(
    asked: Request,
    queue: str,
    request: GenerateRequest,
    key: str,
    after: Place,
    number: int = 0,
    num_requests: int = 1,
) -> GenerateRequest:
    gateway = gateway_of(asked)
    is_cluster = gateway.store.address.kind == "cluster"
    request_id = request_id_of(asked, key, number, is_cluster=is_cluster)
    if after != BEFORE_ALL:  # before anything is noted under the key
        await check_can_go_on(gateway, queue, request_id, after)
    named = request.model_copy(update={"id": request_id})
    card = await gateway.directory.card_of(queue, may_wait=True)  # the code that named the queue has checked it
    await check_same(gateway.store, queue, named, num_requests, card.max_model_len)
    return named
