"""Requests to the queue on behalf of HTTP clients."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.admission.admission import Meter, admitted
from penstock.gateway.context import Gateway, gateway_of
from penstock.gateway.generation.idempotency import check_same, key_of, place_asked_for, request_id_of
from penstock.gateway.http.disconnect import while_wanted
from penstock.gateway.http.events import BEFORE_ALL, EventWriter, Place
from penstock.gateway.http.interruptions import interruption_of
from penstock.gateway.http.streaming import EventStream
from penstock.producer import GenerateRequest, Reply, ReplyStream


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its reply. It is enqueued once somebody reads the reply."""

    queue: str
    reply: ReplyStream
    meter: Meter
    after: Place = BEFORE_ALL  # which a stream goes on behind

    @property
    def id(self) -> str:
        return self.reply.request_id

    async def whole(self, asked: Request) -> Reply:
        """The reply, once it has ended.

        Raises:
            ClientGone: who asked has gone; a request that nobody else knows of is cancelled.
            ApiError: the answer was interrupted.
            Whatever `ReplyStream` raises.
        """
        with gateway_of(asked).watch.reading(self.queue, self.reply):
            reply = await while_wanted(asked.receive, self.reply.read_to_end(), interruption_of(asked))
        self.meter.ended(reply)
        return reply

    def streamed(self, asked: Request, writer: EventWriter) -> Response:
        """The reply as events, while it is written."""
        gateway = gateway_of(asked)
        return EventStream(
            self.reply,
            self.meter.counted(writer),
            reading=gateway.watch.reading(self.queue, self.reply),
            interruption=interruption_of(asked),
            commit_after_s=gateway.settings.commit_after_s,
            ping_interval_s=gateway.settings.ping_interval_s,
            after=self.after,
        )


async def start(asked: Request, queue: str, request: GenerateRequest) -> Job:
    """A job for whoever asks.

    Without an Idempotency-Key it ends with the client. With one it is the same for all who ask with that key, and ends
    once nobody has read it for a while. Each call for one HTTP request is a job of its own.

    Raises:
        ApiError: the key or the Last-Event-ID can't be used, or the key belongs to another request.
        OverLimit: the API key would use more tokens than it may.
        ConnectionLost, ServerRefused: Redis is away or says no.
    """
    gateway = gateway_of(asked)
    key = key_of(asked)
    after = place_asked_for(asked, key)
    if key is not None:
        request = await _named(asked, gateway, queue, request, key)
    request, meter = await admitted(asked, queue, request)
    return Job(queue, gateway.client.on(queue).stream(request), meter, after)


async def _named(asked: Request, gateway: Gateway, queue: str, request: GenerateRequest, key: str) -> GenerateRequest:
    number = getattr(asked.state, "num_jobs", 0)
    asked.state.num_jobs = number + 1
    is_cluster = gateway.store.address.kind == "cluster"
    named = request.model_copy(update={"id": request_id_of(asked, key, number, is_cluster=is_cluster)})
    await check_same(gateway.store, queue, named)
    return named
