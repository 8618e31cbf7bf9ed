"""Worker, gateway and client replace connections that die silently, are half closed or are reset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Client
from penstock.protocol.redis import silence
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import Certificate, running_gateway
from tests.support.programs.worker_harness import Running, running_worker
from tests.support.redis_servers.nodes import proxied_nodes, sentinel
from tests.support.redis_servers.refusing_proxy import RefusingProxy
from tests.support.redis_servers.tls_proxy import tls_of

TOKENS = 60
Break = Callable[[RefusingProxy], None]
BREAKS: dict[str, Break] = {
    "black hole": lambda proxy: proxy.forget(),
    "takes nothing": lambda proxy: proxy.forget(reads_on=False),
    "half closed": lambda proxy: proxy.half_close(),
    "reset": lambda proxy: proxy.reset(),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_S", "LATE_S", "GRACE_S", "ASK_EVERY_S"):
        monkeypatch.setattr(silence, name, 0.2)


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[tuple[Running, AsyncClient, httpx.AsyncClient]]:
    async with (
        running_worker(url, FakeEngine(step_s=0.01), heartbeat_ttl_s=30) as worker,
        running_gateway(url) as gateway,
        AsyncClient(url, queue="q") as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield worker, client, http


async def test_work_goes_on(redis_url: str) -> None:
    async with RefusingProxy(redis_url) as proxy:
        await outlast(proxy.url, [proxy], BREAKS)


async def test_work_over_tls_goes_on(redis_url: str, tmp_path: Path) -> None:
    certificate = Certificate.made_in(tmp_path)
    async with RefusingProxy(redis_url, tls_of(certificate)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={certificate.file}"
        await outlast(url, [proxy], ["black hole", "takes nothing", "reset"])


async def test_a_client_of_threads_goes_on(redis_url: str) -> None:
    """The connections of a blocking client belong to the event loop of another thread."""
    async with (
        RefusingProxy(redis_url) as proxy,
        running_worker(redis_url, FakeEngine(step_s=0.01)),
    ):
        client = await asyncio.to_thread(Client, proxy.url, queue="q")
        try:
            for name, break_all in BREAKS.items():
                handle = await asyncio.to_thread(client.submit, "x", max_tokens=TOKENS)
                chunks = handle.stream()
                first = await asyncio.to_thread(next, chunks)
                break_all(proxy)
                text = "".join(chunk.text for chunk in (first, *await asyncio.to_thread(list, chunks)))
                assert text == expected_text("x", handle.id, TOKENS), name
                break_all(proxy)
                after = await asyncio.to_thread(client.generate, "x", max_tokens=3)
                assert after.text == expected_text("x", after.request_id, 3), name
        finally:
            await asyncio.to_thread(client.close)


async def test_work_behind_sentinel_goes_on(redis_url: str, tmp_path: Path) -> None:
    async with RefusingProxy(redis_url) as proxy:
        with sentinel(tmp_path, proxy.port) as port:
            await outlast(f"redis+sentinel://127.0.0.1:{port}/service/0", [proxy], ["black hole", "reset"])


async def test_work_on_a_cluster_goes_on(redis_cluster: list[EmbeddedServer]) -> None:
    async with proxied_nodes(redis_cluster, RefusingProxy) as (url, nodes):
        await outlast(url, nodes, ["black hole", "reset"])


async def outlast(url: str, proxies: Sequence[RefusingProxy], breaks: Iterable[str]) -> None:
    """Checks streams that are under way, and what comes after all connections were idle."""

    def break_all(name: str) -> None:
        for proxy in proxies:
            BREAKS[name](proxy)

    async with serving(url) as (worker, client, http):
        for name in breaks:
            before = await client.submit("x", max_tokens=TOKENS)
            async with before.stream() as chunks:
                await anext(chunks)
            break_all(name)
            assert (await before.result()).text == expected_text("x", before.id, TOKENS), name
            await eventually(lambda: worker.service.readiness.is_ready)
            break_all(name)
            after = await client.generate("x", max_tokens=3)
            assert after.text == expected_text("x", after.request_id, 3), name
            break_all(name)
            await eventually(lambda: is_served(http))
            await eventually(lambda: worker.service.readiness.is_ready)
            assert not worker.task.done()


async def is_served(http: httpx.AsyncClient) -> bool:
    answer = await http.post("/v1/completions", json={"model": "q", "prompt": "x", "max_tokens": 3})
    assert answer.status_code in (200, 503)
    return answer.status_code == 200
