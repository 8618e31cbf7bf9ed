"""Streams end whole over connections that deliver bytes in odd pieces and are reset in the middle of a reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Client
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text, expected_tokens
from tests.support.patience import WAIT_S, eventually, slow
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.forwarding import Trickling
from tests.support.redis_servers.nodes import proxied_nodes, sentinel

ODD = (1, 1, 2, 1, 3, 97, 1, 5, 331, 13)
TOKENS = 60
SEED = 7
BODY: dict[str, Any] = {"model": "q", "prompt": "x", "max_tokens": TOKENS, "stream": True, "seed": SEED}
EVENTS_PER_RESET = 3


def trickling(url: str, sizes: Sequence[int] = ODD) -> Trickling:
    parts = urlsplit(url)
    return Trickling(parts.hostname or "127.0.0.1", parts.port or 6379, sizes)


@asynccontextmanager
async def address(kind: str, redis_url: str, redis_cluster: list[EmbeddedServer], folder: Path) -> AsyncIterator[str]:
    """Address of a deployment that has a trickling proxy before each server."""
    async with AsyncExitStack() as stack:
        if kind == "cluster":
            url, _ = await stack.enter_async_context(proxied_nodes(redis_cluster, trickling))
            yield url
            return
        proxy = await stack.enter_async_context(trickling(redis_url))
        if kind == "sentinel":
            port = stack.enter_context(sentinel(folder, proxy.port))
            at_sentinel = await stack.enter_async_context(trickling(f"redis://127.0.0.1:{port}"))
            yield f"redis+sentinel://127.0.0.1:{at_sentinel.port}/service/0"
        else:
            yield f"redis://127.0.0.1:{proxy.port}/0"


@pytest.mark.parametrize("kind", ["server", "sentinel", slow("cluster")])
async def test_pieces_of_any_size_make_whole_streams(
    kind: str, redis_url: str, redis_cluster: list[EmbeddedServer], tmp_path: Path
) -> None:
    """A worker, both clients and a gateway are tested."""
    async with (
        address(kind, redis_url, redis_cluster, tmp_path) as url,
        running_worker(url, FakeEngine(step_s=0.002), heartbeat_ttl_s=1000) as worker,
        running_gateway(url) as gateway,
        trickling(gateway.url) as before_gateway,
        AsyncClient(url, queue="q") as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{before_gateway.port}", timeout=WAIT_S) as http,
    ):
        await eventually(client.queues)  # a worker takes requests before it is on the list that gateways read
        events = Events()
        called, *are_whole, _ = await asyncio.gather(
            client.generate("x", max_tokens=TOKENS),
            stream_of(client),
            asyncio.to_thread(of_a_thread, url),
            events.read(http),
        )
        assert called.text == expected_text("x", called.request_id, TOKENS)
        assert are_whole == [True, True]
        assert (events.text, events.is_whole) == (expected_text("x", SEED, TOKENS), True)
        assert not worker.task.done()


async def stream_of(client: AsyncClient) -> bool:
    handle = await client.submit("x", max_tokens=TOKENS)
    async with handle.stream() as chunks:
        tokens = [token for chunk in [each async for each in chunks] for token in chunk.tokens]
    return tokens == expected_tokens(b"x", handle.id, 0, TOKENS)


def of_a_thread(url: str) -> bool:
    with Client(url, queue="q") as client:
        handle = client.submit("x", max_tokens=TOKENS)
        return "".join(chunk.text for chunk in handle.stream()) == expected_text("x", handle.id, TOKENS)


class Events:
    """A streamed answer as far as a client has it, over all its connections."""

    def __init__(self) -> None:
        self.text = self.last_id = ""
        self.is_whole = False
        self._event: dict[str, str] = {}

    async def read(self, http: httpx.AsyncClient, reset: Callable[[], None] = lambda: None) -> None:
        """Resumes where the events end. `reset` is called after a few."""
        headers = {"idempotency-key": "k"} | ({"last-event-id": self.last_id} if self.last_id else {})
        num, self._event = 0, {}
        async with http.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if self._take(line):
                    num += 1
                    if num == EVENTS_PER_RESET:
                        reset()

    def _take(self, line: str) -> bool:
        """Takes a line; returns whether it ends an event, which counts from then on."""
        if line:
            name, _, value = line.partition(": ")
            self._event[name] = value
            return False
        self.last_id = self._event.get("id", self.last_id)
        data = self._event.get("data")
        if data == "[DONE]":
            self.is_whole = True
        elif data is not None:
            self.text += json.loads(data)["choices"][0]["text"]
        self._event = {}
        return True


async def test_a_stream_that_is_reset_in_its_middle_goes_on_with_the_next_token(redis_url: str) -> None:
    """The client resumes by Last-Event-ID, over and over, wherever in an event the connection ends."""
    events, num_resets = Events(), 0

    async with (
        running_worker(redis_url, FakeEngine(step_s=0.01), heartbeat_ttl_s=1000),
        running_gateway(redis_url) as gateway,
        trickling(gateway.url) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=WAIT_S) as http,
    ):

        def reset() -> None:
            nonlocal num_resets
            num_resets += 1
            proxy.reset()

        while not events.is_whole:
            with suppress(httpx.TransportError):
                await events.read(http, reset)
    assert num_resets > 1
    assert events.text == expected_text("x", SEED, TOKENS)
