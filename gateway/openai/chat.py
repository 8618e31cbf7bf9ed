"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.common.documents import (
    Document,
    chat_logprobs,
    check_ended,
    created_at,
    exactness,
    fingerprint,
    prompt_logprobs,
    usage,
)
from penstock.gateway.common.options import Shown
from penstock.gateway.context import gateway_of
from penstock.gateway.generation.jobs import start
from penstock.gateway.http.body import read_json
from penstock.gateway.openai.chat_request import read_chat
from penstock.gateway.openai.events import ChoiceEvents
from penstock.gateway.openai.tokens import prompt_tokens
from penstock.producer import Choice, Chunk, Reply, ToolCallDelta


async def create_chat_completion(asked: Request) -> Response:
    gateway = gateway_of(asked)
    chat = read_chat(await read_json(asked, gateway.settings.max_body_bytes))
    queue = await gateway.directory.queue_of(chat.model)
    request = chat.request(await gateway.directory.card_of(queue))
    shown = chat.shown(await prompt_tokens(asked, queue, request) if chat.return_token_ids else None)
    [job] = await start(asked, queue, request)
    if chat.stream:
        return job.streamed(asked, ChatEvents(_id_of(job.id), chat.model, shown))
    reply = await job.whole(asked)
    return JSONResponse(chat_completion(reply, chat.model, shown), headers=exactness(reply))


def _id_of(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def chat_completion(reply: Reply, model: str, shown: Shown) -> Document:
    """Returns the body of a reply.

    Raises:
        ApiError: it was cancelled, or expired.
    """
    check_ended(reply)
    document: Document = {
        "id": _id_of(reply.request_id),
        "object": "chat.completion",
        "created": created_at(reply.entry_id),
        "model": model,
        "system_fingerprint": fingerprint(reply.arithmetic),
        "choices": [_choice(choice, shown) for choice in reply.choices],
        "usage": usage(reply.usage),
    }
    if shown.prompt_logprobs and reply.prompt_logprobs is not None:
        document["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs)
    if shown.prompt_token_ids is not None:
        document["prompt_token_ids"] = shown.prompt_token_ids
    return document


def _choice(choice: Choice, shown: Shown) -> Document:
    document: Document = {
        "index": choice.index,
        "message": _message(choice, shown),
        "logprobs": chat_logprobs(choice.logprobs or (), shown) if shown.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if shown.token_ids:
        document["token_ids"] = choice.tokens
    return document


def _message(choice: Choice, shown: Shown) -> Document:
    calls = choice.message.get("tool_calls")
    message: Document = {"role": "assistant", "content": choice.text or (None if calls else ""), "refusal": None}
    if choice.reasoning and shown.reasoning:
        message |= _reasoning(choice.reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(text: str) -> Document:
    """Returns the reasoning under two names, as clients differ in which one they read."""
    return {"reasoning": text, "reasoning_content": text}


class ChatEvents(ChoiceEvents):
    """Writes a reply as chunks of a chat completion."""

    kind: ClassVar[str] = "chat.completion.chunk"

    def part(self, chunk: Chunk, *, is_first: bool) -> Document | None:
        delta: Document = _reasoning(chunk.reasoning) if chunk.reasoning and self._shown.reasoning else {}
        if chunk.tool_calls:
            delta["tool_calls"] = [_call(call) for call in chunk.tool_calls]
        if chunk.text:
            delta["content"] = chunk.text
        logprobs = {"logprobs": chat_logprobs(chunk.logprobs, self._shown)} if chunk.logprobs else {}
        if not delta and not logprobs:
            return None
        return {"delta": {"role": "assistant", "content": "", **delta} if is_first else delta, **logprobs}

    def text_part(self, text: str) -> Document:
        return {"delta": {"content": text}}

    def empty_part(self, *, is_first: bool) -> Document:
        return {"delta": {"role": "assistant", "content": ""} if is_first else {}}


def _call(delta: ToolCallDelta) -> Document:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name or "", "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
