"""The official client on a gateway with a scripted worker, and bodies checked with the client's own types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import openai
from pydantic import BaseModel

from penstock.producer import ModelCard
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import Behaviour, ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import CARD, announce, running_gateway

T = TypeVar("T", bound=BaseModel)

HELLO: Any = [{"role": "user", "content": "hello"}]
EPOCH_S = 1_795_298_400
"""Time at which the scripted worker takes a request: its epoch is that in microseconds."""


async def two_words(reply: ScriptedReply) -> None:
    reply.epoch = EPOCH_S * 1_000_000
    await reply.own()
    for index in range(reply.request.n):
        await reply.chunk("two ", index=index)
        await reply.chunk("words", index=index)
    await reply.end("stop")


@dataclass(frozen=True, slots=True)
class Asked:
    """A client, its gateway, and the requests that came to the worker."""

    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    url: str
    worker: ScriptedWorker

    @property
    def request(self) -> GenerateRequest:
        (request,) = self.worker.taken
        return request

    async def post(self, path: str, body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)

    async def body(self, path: str, body: Any, kind: type[T]) -> T:
        """Returns the answer, which must match that type exactly."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return kind.model_validate_json(response.text, strict=True)

    async def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """Returns the documents of a stream that ends with `[DONE]`."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        *documents, last = data_of(response.text)
        assert last == "[DONE]"
        return [json.loads(document) for document in documents]


def data_of(text: str) -> list[str]:
    """Returns the data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


@asynccontextmanager
async def asking(
    redis: RedisClient, redis_url: str, behave: Behaviour = two_words, *, card: ModelCard = CARD, **settings: Any
) -> AsyncIterator[Asked]:
    await announce(redis, card=card)
    async with (
        ScriptedWorker(redis_url, behave) as worker,
        running_gateway(redis_url, **settings) as gateway,
        openai_client(gateway.url) as client,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield Asked(client, http, gateway.url, worker)
