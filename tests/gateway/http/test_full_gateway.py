"""On a full gateway, probes answer on both ports, and no client fills it alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from penstock.gateway.http.observing import PROBES
from penstock.gateway.server import METRICS_LIMITS, serving_metrics
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_harness import Running, announce, new_key, running_gateway

MAX = 8
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "x"}], "stream": True}
Headers = dict[str, str]


@pytest.fixture
async def may_end(redis: RedisClient, redis_url: str) -> AsyncIterator[asyncio.Event]:
    """Event without which no reply ends."""
    may_end = asyncio.Event()

    async def hold(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("sparrows ")
        await may_end.wait()
        await reply.end("stop")

    await announce(redis)
    async with ScriptedWorker(redis_url, hold):
        yield may_end
        may_end.set()


@asynccontextmanager
async def metrics_port(gateway: Running) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving_metrics(gateway.server, listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None))


class Streams:
    """Streams of one client that takes all it can."""

    def __init__(self, client: httpx.AsyncClient, open_ones: AsyncExitStack) -> None:
        self._client = client
        self._open = open_ones

    async def fill(self, headers: Headers) -> int:
        """Opens streams until one is refused; returns how many are open."""
        for num_open in range(MAX + 1):
            answer = await self._open.enter_async_context(self._client.stream("POST", CHAT, json=BODY, headers=headers))
            if answer.status_code != 200:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert (await answer.aread(), answer.json()["error"]["code"])[1] == "unavailable"
                return num_open
        raise AssertionError("it got more than there are")


async def statuses(urls: Sequence[str]) -> set[int]:
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        return {(await client.get(url + path)).status_code for url in urls for path in sorted(PROBES)}


async def test_one_key_does_not_fill_it_and_many_leave_the_probes(
    redis: RedisClient, redis_url: str, may_end: asyncio.Event
) -> None:
    async with (
        running_gateway(redis_url, max_connections=MAX) as gateway,
        metrics_port(gateway) as metrics_url,
        http(gateway.url) as client,
        AsyncExitStack() as open_ones,
    ):
        streams = Streams(client, open_ones)
        keys = [{"x-api-key": (await new_key(redis_url)).text} for _ in range(4)]
        assert [await streams.fill(each) for each in keys] == [4, 2, 1, 1]
        assert await statuses([gateway.url, metrics_url]) == {200}
        full = await client.get("/v1/models", headers={"x-api-key": (await new_key(redis_url)).text})
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        may_end.set()

        async def is_served() -> bool:
            return (await client.get("/v1/models", headers=keys[0])).status_code == 200

        await eventually(is_served)


async def test_without_keys_it_counts_by_address_as_the_proxy_says_it(
    redis: RedisClient, redis_url: str, may_end: asyncio.Event
) -> None:
    async with (
        running_gateway(redis_url, max_connections=MAX, trusted_proxies=("127.0.0.0/8",)) as gateway,
        http(gateway.url) as client,
        AsyncExitStack() as open_ones,
    ):
        streams = Streams(client, open_ones)
        addresses = [{"x-forwarded-for": f"203.0.113.{number}"} for number in (1, 2)]
        assert [await streams.fill(each) for each in addresses] == [4, 2]
        assert (await client.get("/v1/models", headers=addresses[0])).status_code == 503
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/")).status_code == 200
        may_end.set()


async def test_without_keys_and_proxies_it_counts_by_who_connects(
    redis: RedisClient, redis_url: str, may_end: asyncio.Event
) -> None:
    async with (
        running_gateway(redis_url, max_connections=MAX) as gateway,
        http(gateway.url) as client,
        AsyncExitStack() as open_ones,
    ):
        assert await Streams(client, open_ones).fill({"x-forwarded-for": "203.0.113.1"}) == 4
        assert (await client.get("/v1/models", headers={"x-forwarded-for": "203.0.113.2"})).status_code == 503
        may_end.set()


async def test_scrapers_do_not_starve_probes(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_scraping, may_end = 0, asyncio.Event()

    async def scrape(*_: object) -> tuple[bytes, str]:
        nonlocal num_scraping
        num_scraping += 1
        await may_end.wait()
        return b"", "text/plain"

    async with (
        running_gateway(redis_url) as gateway,
        metrics_port(gateway) as metrics_url,
        http(metrics_url) as client,
    ):
        monkeypatch.setattr(gateway.server, "scrape", scrape)
        scrapes = [asyncio.create_task(client.get("/metrics")) for _ in range(METRICS_LIMITS.max_connections)]
        await eventually(lambda: num_scraping == len(scrapes))
        assert await statuses([metrics_url]) == {200}
        one_more = await client.get("/metrics")
        assert (one_more.status_code, one_more.headers["retry-after"]) == (503, "1")
        may_end.set()
        assert {(await each).status_code for each in scrapes} <= {200}


async def test_at_the_metrics_port_readiness_says_that_it_starts_and_drains(
    redis: RedisClient, redis_url: str, may_end: asyncio.Event
) -> None:
    async with (
        running_gateway(redis_url, drain_timeout_s=WAIT_S) as gateway,
        metrics_port(gateway) as metrics_url,
        http(gateway.url) as client,
        http(metrics_url) as prober,
    ):
        running = gateway.server.app.state.gateway
        gateway.server.app.state.gateway = None  # as before its start
        starting = await prober.get("/readiness")
        assert (starting.status_code, starting.json()["reasons"]) == (503, {"gateway": "starting"})
        gateway.server.app.state.gateway = running
        assert (await prober.get("/readiness")).status_code == 200
        async with client.stream("POST", CHAT, json=BODY) as answer:
            assert answer.status_code == 200
            gateway.server.stop()
            draining = await prober.get("/readiness")
            assert (draining.status_code, draining.json()["reasons"]) == (503, {"gateway": "draining"})
            assert (await prober.get("/liveness")).json() == {"alive": True}
            may_end.set()
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
