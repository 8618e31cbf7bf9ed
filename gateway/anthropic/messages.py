"""`/v1/messages`: https://platform.claude.com/docs/en/api/messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.anthropic.documents import message
from penstock.gateway.anthropic.events import MessageEvents
from penstock.gateway.anthropic.request import read_count, read_message
from penstock.gateway.common.documents import exactness
from penstock.gateway.context import gateway_of
from penstock.gateway.generation.jobs import start
from penstock.gateway.http.answers import request_id_of
from penstock.gateway.http.body import read_json
from penstock.gateway.http.disconnect import while_asked


async def create_message(asked: Request) -> Response:
    gateway = gateway_of(asked)
    body = read_message(await read_json(asked, gateway.settings.max_body_bytes))
    queue = await gateway.directory.queue_of(body.model)
    [job] = await start(asked, queue, body.request())
    shows_thinking = body.shows_thinking
    if not body.stream:
        reply = await job.whole(asked)
        return JSONResponse(message(reply, body.model, shows_thinking=shows_thinking), headers=exactness(reply))
    http_request_id = request_id_of(asked.scope)
    writer = MessageEvents(job.id, body.model, shows_thinking=shows_thinking, http_request_id=http_request_id)
    return job.streamed(asked, writer)


async def count_tokens(asked: Request) -> Response:
    gateway = gateway_of(asked)
    body = read_count(await read_json(asked, gateway.settings.max_body_bytes))
    queue = await gateway.directory.queue_of(body.model)
    counting = gateway.client.on(queue).count_tokens(body.request())
    return JSONResponse({"input_tokens": await while_asked(asked, counting)})
