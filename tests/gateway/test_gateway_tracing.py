"""The span of an HTTP request, and its trace as it goes on to the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import pytest

from penstock.protocol.redis.connection import RedisClient
from tests.support.otlp_collector import Seen
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedWorker, echo, until_cancelled
from tests.support.programs.gateway_client import CHAT, chat
from tests.support.programs.gateway_harness import announce, running_gateway
from tests.support.programs.traced_worker import InMemory

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID, PARENT_ID = TRACEPARENT.split("-")[1:3]


@dataclass(frozen=True)
class Traced:
    http: httpx2.AsyncClient
    worker: ScriptedWorker
    memory: InMemory

    async def spans(self, name: str, count: int = 1) -> list[Seen]:
        await eventually(lambda: len(self.memory.named(name)) >= count)
        found = self.memory.named(name)
        assert len(found) == count
        return found


@pytest.fixture
async def traced(redis: RedisClient, redis_url: str) -> AsyncIterator[Traced]:
    await announce(redis)
    memory = InMemory.of("gateway")
    async with (
        ScriptedWorker(redis_url, echo) as worker,
        running_gateway(redis_url, telemetry=memory.telemetry) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield Traced(http, worker, memory)
    memory.telemetry.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_clients_trace_goes_on(traced: Traced, streamed: bool) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    answer = await traced.http.post(CHAT, json=chat(stream=streamed), headers=headers)
    assert answer.status_code == 200
    [asked] = await traced.spans(f"POST {CHAT}")
    [following], [sending] = await traced.spans("chat default"), await traced.spans("send default")
    assert (asked.trace_id, asked.parent_id) == (TRACE_ID, PARENT_ID)
    assert (following.parent_id, sending.parent_id) == (asked.span_id, following.span_id)
    assert traced.worker.taken[0].traceparent == f"00-{TRACE_ID}-{sending.span_id}-01"
    assert traced.worker.taken[0].tracestate == "a=b"
    assert asked.end_ns >= following.end_ns
    assert asked.attributes["url.path"] == CHAT
    assert asked.attributes["http.request.method"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [[], [("traceparent", "nonsense"), ("tracestate", "a=b")], [("traceparent", TRACEPARENT)] * 2],
    ids=["none", "invalid", "two"],
)
async def test_what_is_no_trace_begins_one(traced: Traced, headers: list[tuple[str, str]]) -> None:
    assert (await traced.http.post(CHAT, json=chat(), headers=headers)).status_code == 200
    [asked] = await traced.spans(f"POST {CHAT}")
    assert asked.parent_id is None
    assert asked.trace_id != TRACE_ID
    assert (traced.worker.taken[0].traceparent or "").split("-")[1] == asked.trace_id
    assert traced.worker.taken[0].tracestate is None


async def test_what_a_client_did_is_no_error_of_the_server(traced: Traced) -> None:
    assert (await traced.http.post(CHAT, json={"model": "default"})).status_code == 400
    assert (await traced.http.request("PROPFIND", "/pot")).status_code == 404
    assert (await traced.http.get("/liveness")).status_code == 200
    [refused], [unknown] = await traced.spans(f"POST {CHAT}"), await traced.spans("HTTP")
    assert [span.attributes["http.response.status_code"] for span in (refused, unknown)] == [400, 404]
    assert not refused.is_error
    assert unknown.attributes["http.request.method"] == "_OTHER"
    assert len(traced.memory.spans) == 2  # probes are none


async def test_a_client_that_goes_leaves_no_open_span(traced: Traced) -> None:
    traced.worker.behave = until_cancelled
    task = asyncio.create_task(traced.http.post(CHAT, json=chat()))
    await eventually(lambda: traced.worker.taken)
    task.cancel()
    [asked], [following] = await traced.spans(f"POST {CHAT}"), await traced.spans("chat default")
    assert asked.attributes["http.response.status_code"] == 499
    assert following.attributes["penstock.outcome"] == "left"


async def test_without_tracing_the_clients_headers_reach_the_worker(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    async with (
        ScriptedWorker(redis_url, echo) as worker,
        running_gateway(redis_url) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        await http.post(CHAT, json=chat(), headers=headers)
        await http.post(CHAT, json=chat(), headers={**headers, "tracestate": "nonsense"})
    assert [request.traceparent for request in worker.taken] == [TRACEPARENT] * 2
    assert [request.tracestate for request in worker.taken] == ["a=b", None]
