"""When Redis refuses behind Sentinel or in a cluster, worker, gateway, client and `top` wait as on a single server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2 as httpx

from penstock.cli.top import ANSWER_S
from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, Handle, PenstockError, Reply
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, answered, connect
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import Running, running_worker
from tests.support.redis_servers.nodes import proxied_nodes, sentinel
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

TOKENS = 60


async def test_a_cluster_that_refuses_is_waited_for(redis_cluster: list[EmbeddedServer]) -> None:
    async with (
        proxied_nodes(redis_cluster, RefusingProxy) as (url, proxies),
        running_worker(url, FakeEngine(step_s=0.002), heartbeat_ttl_s=30) as worker,
    ):
        await outlast_all(worker, proxies, url, url)


async def test_a_server_behind_sentinel_that_refuses_is_waited_for(redis_url: str, tmp_path: Path) -> None:
    async with RefusingProxy(redis_url) as proxy:
        with sentinel(tmp_path, proxy.port) as port:
            url = f"redis+sentinel://127.0.0.1:{port}/service/0"
            async with running_worker(url, FakeEngine(step_s=0.002), heartbeat_ttl_s=30) as worker:
                await outlast_all(worker, [proxy], url, redis_url)


async def outlast_all(worker: Running, proxies: Sequence[RefusingProxy], url: str, url_of_client: str) -> None:
    readiness = worker.service.readiness
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(url_of_client, queue="q"))
        gateway = await stack.enter_async_context(running_gateway(url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S))
        through = await stack.enter_async_context(AsyncClient(url, queue="q"))
        screen = connect(url, decode=False, retries=0)
        stack.push_async_callback(screen.aclose)
        for code, answer in {**PASSING, "max number of clients": FULL, **REFUSED}.items():
            before = await client.submit("x", max_tokens=TOKENS)
            reading = await begun(through.handle(before.id))
            for proxy in proxies:
                if answer == FULL:
                    proxy.greeting = FULL
                    proxy.cut()
                else:
                    proxy.refuse(answer)
            mapped = asyncio.create_task(errors_of(through)) if code not in REFUSED else None
            await eventually(lambda: len(readiness.reasons) >= 4)
            assert readiness.trouble in (("refused",) if code in REFUSED else ("passing", "away")), code
            refused = await completion(http)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True), code
            assert not await is_shown(screen, url), code
            for proxy in proxies:
                proxy.allow()
            assert (await reading).text == expected_text("x", before.id, TOKENS), code
            assert mapped is None or await mapped == [None, None], code
            after = await client.generate("x", max_tokens=TOKENS)
            assert after.text == expected_text("x", after.request_id, TOKENS), code
            await eventually(lambda: readiness.is_ready)
            await eventually(lambda: is_answered(http))
            await eventually(lambda: is_shown(screen, url))
            assert not worker.task.done()


async def begun(handle: Handle) -> asyncio.Task[Reply]:
    """Reads a reply that has begun to its end."""
    stream = handle.stream()
    await anext(stream)
    return asyncio.create_task(stream.read_to_end())


async def errors_of(client: AsyncClient) -> list[Exception | None]:
    """Returns the errors of a few requests that are waited for."""
    return [result.error async for result in client.map(["y", "z"], max_tokens=3)]


async def is_shown(screen: RedisClient, url: str) -> bool:
    """Checks whether `penstock top` would show the queue."""
    try:
        async with answered(parse_url(url), ANSWER_S):
            await look(screen, "q")
    except PenstockError:
        return False
    return True


async def completion(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": "q", "prompt": "x", "max_tokens": 3})


async def is_answered(http: httpx.AsyncClient) -> bool:
    answer = await completion(http)
    assert answer.status_code in (200, 503)
    return answer.status_code == 200
