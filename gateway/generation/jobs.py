"""Requests to the queue on behalf of HTTP clients."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.admission.admission import Meter, admitted
from penstock.gateway.context import gateway_of
from penstock.gateway.http.disconnect import while_there
from penstock.gateway.http.events import EventWriter
from penstock.gateway.http.streaming import EventStream
from penstock.producer import GenerateRequest, Reply, ReplyStream


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its reply. It is enqueued once somebody reads the reply."""

    queue: str
    request: GenerateRequest
    reply: ReplyStream
    meter: Meter

    @property
    def id(self) -> str:
        return self.reply.request_id

    async def whole(self, asked: Request) -> Reply:
        """The reply, once it has ended.

        Raises:
            ClientGone: who asked has gone; a request that nobody else knows of is cancelled.
            Whatever `ReplyStream` raises.
        """
        reply = await while_there(asked.receive, self.reply.read_to_end())
        self.meter.ended(reply)
        return reply

    def streamed(self, asked: Request, writer: EventWriter) -> Response:
        """The reply as events, while it is written."""
        settings = gateway_of(asked).settings
        return EventStream(
            self.reply,
            self.meter.counted(writer),
            commit_after_s=settings.commit_after_s,
            ping_interval_s=settings.ping_interval_s,
        )


async def start(asked: Request, queue: str, request: GenerateRequest) -> Job:
    """A job that ends with the client that asked for it."""
    request, meter = await admitted(asked, queue, request)
    return Job(queue, request, gateway_of(asked).client.on(queue).stream(request), meter)
