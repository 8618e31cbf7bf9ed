"""Gateway clients: OpenAI's, and a bare one for tests of the wire and of connections that the test ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import httpx2
import openai

from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_harness import Running, running_gateway

CHAT: Final = "/v1/chat/completions"


class Received(NamedTuple):
    """One event of a stream."""

    data: str
    id: str | None = None

    @property
    def document(self) -> Any:
        return json.loads(self.data)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], **fields}


def events_of(body: str) -> list[Received]:
    """Parses the events of a whole stream, without its comments."""
    return [event for block in body.split("\n\n") if (event := _event(block.split("\n"))) is not None]


def text_of(events: Iterable[Received]) -> str:
    """Joins the text of a chat's first choice."""
    documents = [event.document for event in events if event.data != "[DONE]"]
    choices = [choice for document in documents for choice in document["choices"] if choice["index"] == 0]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def openai_client(url: str, key: str = "none", *, max_retries: int = 0, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries, **options)


@dataclass(frozen=True, slots=True)
class Asked:
    """Clients of a gateway, and the requests that came to the worker behind it."""

    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    worker: ScriptedWorker | None
    redis: RedisClient

    @property
    def requests(self) -> list[GenerateRequest]:
        assert self.worker is not None
        return self.worker.taken

    @classmethod
    @asynccontextmanager
    async def beside(
        cls, worker: ScriptedWorker | None, redis: RedisClient, redis_url: str, key: str = "none", **settings: Any
    ) -> AsyncIterator[Self]:
        """Runs a gateway in front of a worker that is there already, or will be."""
        async with (
            running_gateway(redis_url, **settings) as gateway,
            openai_client(gateway.url, key) as client,
            bare_client(gateway) as http,
        ):
            yield cls(client, http, worker, redis)


@asynccontextmanager
async def bare_client(*gateways: Running) -> AsyncIterator[Any]:
    """Makes a client, or one for each of several gateways."""
    clients = [httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S, trust_env=False) for gateway in gateways]
    try:
        yield clients[0] if len(clients) == 1 else clients
    finally:
        for client in clients:
            await client.aclose()


async def read_events(response: httpx2.Response) -> AsyncIterator[Received]:
    """Yields the events of a stream as they come. Dropping the iterator closes the response."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line:
            lines.append(line)
        elif (event := _event(lines)) is not None:
            yield event
            lines = []
        else:
            lines = []


def _event(lines: Iterable[str]) -> Received | None:
    fields = dict(line.split(": ", 1) for line in lines if line and not line.startswith(":"))
    return Received(fields["data"], fields.get("id")) if "data" in fields else None
