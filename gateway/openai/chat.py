"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.generation.jobs import start
from penstock.gateway.http.body import read_json
from penstock.gateway.http.events import Event
from penstock.producer import Chunk, GenerateRequest, Reply
from penstock.producer.wire import explain


async def create_chat_completion(asked: Request) -> Response:
    gateway = gateway_of(asked)
    body = await read_json(asked, gateway.settings.max_body_bytes)
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise ApiError(400, "model: a name is needed", param="model")
    queue = await gateway.directory.queue_of(model)
    is_streamed = bool(body.pop("stream", False))
    try:
        request = GenerateRequest.model_validate(body)
    except ValidationError as error:
        raise ApiError(400, explain(error)) from None
    job = await start(asked, queue, request)
    if is_streamed:
        return job.streamed(asked, ChatEvents(job.id, model))
    return JSONResponse(completion(await job.whole(asked), model))


def completion(reply: Reply, model: str) -> dict[str, Any]:
    choices = [
        {"index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason, "logprobs": None}
        for choice in reply.choices
    ]
    return {"id": f"chatcmpl-{reply.request_id}", "object": "chat.completion", "model": model, "choices": choices}


class ChatEvents:
    """A reply as chunks of a chat completion."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._model = model

    def chunk(self, chunk: Chunk) -> Iterable[Event]:
        choice = {"index": chunk.index, "delta": {"content": chunk.text}, "finish_reason": None}
        document = {"id": self._id, "object": "chat.completion.chunk", "model": self._model, "choices": [choice]}
        yield Event(json.dumps(document))

    def end(self, reply: Reply) -> Iterable[Event]:
        yield Event("[DONE]")

    def error(self, error: ApiError) -> Iterable[Event]:
        yield Event(json.dumps(error.body()))
