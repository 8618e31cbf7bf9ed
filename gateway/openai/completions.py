"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.common.documents import (
    Document,
    check_ended,
    created_at,
    exactness,
    fingerprint,
    prompt_logprobs,
    usage,
)
from penstock.gateway.common.options import Shown
from penstock.gateway.context import gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.generation.jobs import Job, start
from penstock.gateway.http.body import read_json
from penstock.gateway.http.disconnect import while_asked
from penstock.gateway.openai.completion_request import CompletionBody, read_completion
from penstock.gateway.openai.events import ChoiceEvents
from penstock.gateway.openai.legacy_logprobs import LegacyLogprobs, joined
from penstock.gateway.openai.tokens import prompt_of, tokens_of
from penstock.producer import AsyncClient, Choice, Chunk, GenerateRequest, Reply
from penstock.protocol.tasks import end_tasks


async def create_completion(asked: Request) -> Response:
    gateway = gateway_of(asked)
    body = read_completion(await read_json(asked, gateway.settings.max_body_bytes))
    check_number(len(body.prompts), gateway.settings.max_prompts)
    queue = await gateway.directory.queue_of(body.model)
    requests = body.requests()
    parts = await _parts(asked, queue, body, requests)
    jobs = await start(asked, queue, *requests)
    if body.stream:
        return jobs[0].streamed(asked, CompletionEvents(_id_of(jobs[0].id), body.model, *parts[0]))
    replies = await _all(asked, jobs)
    return JSONResponse(completion(replies, body.model, parts), headers=exactness(*replies))


PartShown = tuple[Shown, str]
"""The parts shown of the answers to one prompt, and the prompt's text if its log-probabilities are shown."""


async def _parts(
    asked: Request, queue: str, body: CompletionBody, requests: Sequence[GenerateRequest]
) -> Sequence[PartShown]:
    if not (body.return_token_ids or body.is_echo_scored):
        return [(body.shown, "") for _ in requests]
    return await while_asked(asked, parts_of(gateway_of(asked).client.on(queue), body, requests))


async def parts_of(
    client: AsyncClient, body: CompletionBody, requests: Sequence[GenerateRequest]
) -> Sequence[PartShown]:
    """Returns the part for each prompt. `client` is of the queue: only a worker knows a prompt's tokens and text."""
    return [await _part(client, body, request) for request in requests]


async def _part(client: AsyncClient, body: CompletionBody, request: GenerateRequest) -> PartShown:
    shown = body.shown
    if body.return_token_ids:
        shown = replace(shown, prompt_token_ids=await tokens_of(client, request))
    return shown, await prompt_of(client, request) if body.is_echo_scored else ""


async def _all(asked: Request, jobs: Sequence[Job]) -> list[Reply]:
    """Returns the replies. An error of one ends all."""
    tasks = [asyncio.create_task(job.whole(asked)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


def check_number(num_prompts: int, limit: int) -> None:
    """Raises ApiError if there are more prompts than one request may have."""
    if num_prompts > limit:
        message = f"prompt: has {num_prompts} prompts, the limit max_prompts is {limit}"
        raise ApiError(400, message, param="prompt", code="invalid_value")


def _id_of(request_id: str) -> str:
    return f"cmpl-{request_id}"


def completion(replies: Sequence[Reply], model: str, parts: Sequence[PartShown]) -> Document:
    """Returns the body of the replies to all prompts: the choices of the first prompt come first.

    Raises:
        ApiError: one was cancelled, or expired.
    """
    for reply in replies:
        check_ended(reply)
    choices = [
        _choice(reply, choice, part) for reply, part in zip(replies, parts, strict=True) for choice in reply.choices
    ]
    return {
        "id": _id_of(replies[0].request_id),
        "object": "text_completion",
        "created": created_at(replies[0].entry_id),
        "model": model,
        "system_fingerprint": fingerprint(replies[0].arithmetic),
        "choices": [{**choice, "index": index} for index, choice in enumerate(choices)],
        "usage": usage(*(reply.usage for reply in replies)),
    }


def _choice(reply: Reply, choice: Choice, part: PartShown) -> Document:
    shown, text = part
    document: Document = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": _logprobs(reply, choice, shown, text) if shown.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if shown.prompt_logprobs and reply.prompt_logprobs is not None:
        document["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs)
    if shown.token_ids:
        document |= {"token_ids": choice.tokens, "prompt_token_ids": shown.prompt_token_ids}
    return document


def _logprobs(reply: Reply, choice: Choice, shown: Shown, text: str) -> Document:
    writer = LegacyLogprobs(shown)
    if not text or reply.prompt_logprobs is None:
        return writer.part(choice.logprobs or (), choice.text, is_last=True)
    prompt = writer.prompt(reply.prompt_logprobs, text)
    return joined(prompt, writer.part(choice.logprobs or (), choice.text, is_last=True))


class CompletionEvents(ChoiceEvents):
    """Writes a reply as chunks of a completion."""

    kind: ClassVar[str] = "text_completion"

    def __init__(self, completion_id: str, model: str, shown: Shown, prompt_text: str = "") -> None:
        super().__init__(completion_id, model, shown)
        self._prompt_text = prompt_text
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def part(self, chunk: Chunk, *, is_first: bool) -> Document | None:
        logprobs = self._logprobs_of(chunk) if self._shown.logprobs else None
        if not (chunk.text or logprobs):
            return None
        return {"text": chunk.text, "logprobs": logprobs}

    def text_part(self, text: str) -> Document:
        return {"text": text}

    def empty_part(self, *, is_first: bool) -> Document:
        return {"text": ""}

    def last_part(self, index: int, *, is_first: bool) -> Document:
        """Returns the log-probabilities of tokens whose text never came."""
        writer = self._logprobs.get(index)
        kept = None if writer is None else writer.part((), "", is_last=True)
        return {"text": "", "logprobs": kept} if kept and kept["tokens"] else self.empty_part(is_first=is_first)

    def _logprobs_of(self, chunk: Chunk) -> Document | None:
        writer = self._logprobs.setdefault(chunk.index, LegacyLogprobs(self._shown))
        if self._prompt_text and chunk.prompt_logprobs:
            prompt = writer.prompt(chunk.prompt_logprobs, self._prompt_text)
            return joined(prompt, writer.part(chunk.logprobs or (), chunk.text))
        part = writer.part(chunk.logprobs or (), chunk.text, is_last=chunk.finish_reason is not None)
        return part if part["tokens"] else None
