"""A request has one trace, whatever becomes of the workers, and the trace has no word of any text."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from penstock.producer import AsyncClient
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.telemetry.recorder import SCHEMA_URL
from penstock.protocol.telemetry.sdk import Telemetry, from_environment
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.otlp_collector import Collector, Seen
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_client import CHAT
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.traced_worker import InMemory, traced
from tests.support.programs.worker_harness import is_queue_empty, read_reply, read_until, running_worker, send
from tests.support.programs.worker_process import WorkerProcess

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
SECRET = "SECRET"
DOCS = (ROOT / "docs" / "tracing.md").read_text()


def tree(spans: Iterable[Seen], parent_id: str | None) -> dict[str, Any]:
    """Returns the names below a span in the order in which they began; each span is there once."""
    spans = list(spans)
    below = sorted((span for span in spans if span.parent_id == parent_id), key=lambda span: span.start_ns)
    assert len({span.span_id for span in spans}) == len(spans)
    assert len({span.name for span in below}) == len(below)
    return {span.name: tree(spans, span.span_id) for span in below}


WORKER_TREE: dict[str, Any] = {
    "wait q": {},
    "claim q": {},
    "process q": {"prepare": {}, "prefill": {}, "decode": {}},
}


async def ended(memory: InMemory, name: str, count: int = 1) -> list[Seen]:
    """Waits for `count` spans of this name, and returns them."""
    await eventually(lambda: len(memory.named(name)) >= count)
    found = memory.named(name)
    assert len(found) == count
    return found


def is_chunk(entry: object) -> bool:
    return getattr(entry, "type", None) == "chunk"


async def test_one_tree_from_the_http_client_to_the_last_token(redis_url: str, redis: RedisClient) -> None:
    gateway, worker = InMemory.of("gateway"), InMemory.of("worker")
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    body = {
        "model": "q",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 4,
        "temperature": 0.5,
        "n": 2,
    }
    async with (
        running_worker(redis_url, telemetry=worker.telemetry, name="w"),
        running_gateway(redis_url, telemetry=gateway.telemetry) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=WAIT_S) as http,
    ):
        assert (await http.post(CHAT, json=body, headers=headers)).status_code == 200
        await ended(worker, "process q")
        await ended(gateway, f"POST {CHAT}")
        spans = gateway.spans + worker.spans
        assert {span.trace_id for span in spans} == {TRACE_ID}
        assert {span.state for span in spans} == {"vendor=1"}
        [send_tree] = tree(spans, PARENT_ID).values()
        assert tree(spans, PARENT_ID) == {f"POST {CHAT}": {"chat q": {"send q": WORKER_TREE}}}, send_tree
        [http_span], [chat], [process] = (
            [span for span in spans if span.name == name] for name in (f"POST {CHAT}", "chat q", "process q")
        )
    assert http_span.attributes["http.route"] == CHAT
    assert http_span.attributes["http.response.status_code"] == 200
    for span in (chat, process):
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.provider.name"] == "penstock"
        assert (span.attributes["gen_ai.request.max_tokens"], span.attributes["gen_ai.request.temperature"]) == (4, 0.5)
        assert span.attributes["gen_ai.request.choice.count"] == 2
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
        assert span.attributes["gen_ai.usage.output_tokens"] == 8
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert process.attributes["messaging.system"] == "redis"
    assert process.attributes["messaging.destination.name"] == "q"
    assert process.attributes["messaging.operation.type"] == "process"
    assert process.attributes["messaging.consumer.group.name"] == "workers"
    assert process.attributes["messaging.client.id"] == "w"
    assert chat.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert [span.service for span in (http_span, chat, process)] == ["gateway", "gateway", "worker"]


def documented() -> set[str]:
    """Returns the attributes in docs/tracing.md. A name that begins with a dot shares the last full name but its last
    part.
    """
    found, stem = set(), ""
    table = DOCS.split("## What spans say")[1].split("\n## ")[0]
    for name in re.findall(r"`([a-z_]*(?:\.[a-z_]+)+)`", table):
        if not name.startswith("."):
            stem = name.rpartition(".")[0]
        found.add(stem + name if name.startswith(".") else name)
    return found


async def test_the_page_has_every_attribute_and_the_version_of_the_conventions(
    redis_url: str, redis: RedisClient
) -> None:
    seen = InMemory.of("both")
    options = {"top_p": 0.9, "top_k": 5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 1, "temperature": 1}
    body = {"model": "q", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "n": 2, **options}
    async with (
        running_worker(redis_url, telemetry=seen.telemetry),
        running_gateway(redis_url, telemetry=seen.telemetry) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=WAIT_S) as http,
    ):
        assert (await http.post(CHAT, json=body)).status_code == 200
        await send(redis, prompt="x", id="x", max_tokens=3, tenant="acme", priority=1)
        await read_reply(redis, "x")
        await send(redis, nonsense="x", id="y")
        await read_reply(redis, "y")
        await ended(seen, "process q", 3)
        spans = seen.spans
    elsewhere = {"penstock.outcome", "penstock.resumed_tokens", "gen_ai.usage.reasoning.output_tokens"}
    assert {name for span in spans for name in span.attributes} | elsewhere == documented()
    assert "`penstock.link`" in DOCS
    assert f"conventions {SCHEMA_URL.rpartition('/')[2]}," in " ".join(DOCS.split())
    assert f"({version('opentelemetry-semantic-conventions')})" in DOCS


async def test_a_request_of_redis_cli_has_a_trace_of_its_own(redis_url: str, redis: RedisClient) -> None:
    worker = InMemory.of("worker")
    async with running_worker(redis_url, telemetry=worker.telemetry):
        for request_id in ("a", "b"):
            await send(redis, prompt="x", id=request_id, max_tokens=3, n=2, tenant="acme")
            assert (await read_reply(redis, request_id)).end.finish_reason == "length"
        roots = await ended(worker, "request q", 2)
        spans = worker.spans
    assert len({root.trace_id for root in roots}) == 2
    for root in roots:
        own = [span for span in spans if span.trace_id == root.trace_id]
        assert tree(own, None) == {"request q": WORKER_TREE}
        [process] = [span for span in own if span.name == "process q"]
        assert process.attributes["gen_ai.operation.name"] == "text_completion"
        assert process.attributes["penstock.tenant"] == "acme"
        assert process.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
        starts = {span.name: span.start_ns for span in own}
        ends = {span.name: span.end_ns for span in own}
        assert root.start_ns == starts["wait q"] <= ends["wait q"] == starts["process q"] == starts["prepare"]
        assert ends["prepare"] == starts["prefill"] <= ends["prefill"] == starts["decode"] <= ends["decode"]
        assert ends["decode"] == ends["process q"] == root.end_ns


@pytest.mark.parametrize("traceparent", [TRACEPARENT, None], ids=["of a client", "of its own"])
async def test_a_kill_leaves_one_tree(
    redis_url: str, redis: RedisClient, tmp_path: Path, traceparent: str | None
) -> None:
    """The victim has exported what it knew; the heir ends the span that the victim can't, and links to it."""
    heir_sees = InMemory.of("heir")
    trace = {} if traceparent is None else {"traceparent": traceparent}
    with Collector() as collector:
        make = traced({**collector.environment, "OTEL_SERVICE_NAME": "victim"})
        with WorkerProcess(redis_url, tmp_path / "log", engine={"step_s": 0.005}, make=make, name="victim") as victim:
            await send(redis, prompt="x", id="x", max_tokens=300, n=2, **trace)
            await read_until(redis, "x", is_chunk)
            await asyncio.to_thread(
                collector.wait_for, lambda: any(span.name == "prefill" for span in collector.spans), WAIT_S
            )
            victim.kill()
            async with running_worker(redis_url, telemetry=heir_sees.telemetry, name="heir"):
                reply = await read_reply(redis, "x")
                await eventually(lambda: is_queue_empty(redis))
                lost, process = await ended(heir_sees, "process q", 2)
    assert reply.owners == ["victim", "heir"]
    assert [reply.text(index) for index in range(2)] == [expected_text("x", "x", 300, index) for index in range(2)]
    assert {span.service for span in collector.spans} == {"victim"}
    assert collector.named("process q") == []
    spans = collector.spans + heir_sees.spans
    assert len({span.trace_id for span in spans}) == 1
    if traceparent is not None:
        assert (spans[0].trace_id, lost.parent_id, process.parent_id) == (TRACE_ID, PARENT_ID, PARENT_ID)
    else:
        [root] = heir_sees.named("request q")
        assert (root.parent_id, lost.parent_id, process.parent_id) == (None, root.span_id, root.span_id)
    assert lost.is_error
    assert lost.attributes["error.type"] == "claim_lost"
    assert (lost.attributes["messaging.client.id"], process.attributes["messaging.client.id"]) == ("victim", "heir")
    assert (lost.attributes["penstock.attempt"], process.attributes["penstock.attempt"]) == (1, 2)
    assert process.links == [(lost.trace_id, lost.span_id, {"penstock.link": "takeover"})]
    assert lost.end_ns == process.start_ns
    assert process.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert process.attributes["gen_ai.usage.output_tokens"] == 600
    below = {span.name: span for span in collector.spans if span.parent_id == lost.span_id}
    assert set(below) == {"prepare", "prefill"}
    assert all(lost.start_ns <= span.start_ns for span in below.values())
    [resumed] = [span for span in heir_sees.named("prefill") if span.parent_id == process.span_id]
    assert 0 < resumed.attributes["penstock.resumed_tokens"] < 600


async def test_a_frozen_worker_does_not_end_what_another_has_ended(
    redis_url: str, redis: RedisClient, tmp_path: Path
) -> None:
    heir_sees = InMemory.of("heir")
    with Collector() as collector:
        make = traced(collector.environment)
        with WorkerProcess(redis_url, tmp_path / "log", engine={"step_s": 0.005}, make=make, name="zombie") as zombie:
            await send(redis, prompt="x", id="x", max_tokens=4000, traceparent=TRACEPARENT)
            await read_until(redis, "x", is_chunk)
            zombie.send(signal.SIGSTOP)
            engine = FakeEngine()
            async with running_worker(redis_url, engine, telemetry=heir_sees.telemetry, name="heir"):
                await eventually(lambda: engine.prefilled == ["x"])
                engine.hold()
                zombie.send(signal.SIGCONT)
                await asyncio.to_thread(
                    collector.wait_for, lambda: any(span.name == "decode" for span in collector.spans), WAIT_S
                )
                engine.allow()
                await read_reply(redis, "x")
                lost, process = await ended(heir_sees, "process q", 2)
            zombie.send(signal.SIGTERM)
            assert await asyncio.to_thread(zombie.wait, WAIT_S) == 0
    assert collector.named("process q") == []
    [decode] = collector.named("decode")
    assert decode.attributes["penstock.outcome"] == "fenced"
    assert decode.parent_id == lost.span_id != process.span_id


async def test_a_request_that_is_handed_back_is_linked(redis_url: str, redis: RedisClient) -> None:
    first, second = InMemory.of("first"), InMemory.of("second")
    engine = FakeEngine(step_s=0.005)
    async with running_worker(
        redis_url, engine, telemetry=first.telemetry, name="first", drain_timeout_s=0.0
    ) as draining:
        await send(redis, prompt="x", id="x", max_tokens=500, traceparent=TRACEPARENT)
        await read_until(redis, "x", is_chunk)
        await draining.drain()
    async with running_worker(redis_url, telemetry=second.telemetry, name="second"):
        await read_reply(redis, "x")
        [after] = await ended(second, "process q")
    [before] = first.named("process q")
    assert before.attributes["penstock.outcome"] == "handed_back"
    assert not before.is_error
    assert after.links == [(before.trace_id, before.span_id, {"penstock.link": "handed_back"})]
    assert first.named("decode")[0].parent_id == before.span_id


async def test_a_traceparent_that_is_none_costs_nothing(redis_url: str, redis: RedisClient) -> None:
    worker = InMemory.of("worker")
    async with running_worker(redis_url, telemetry=worker.telemetry):
        await send(redis, prompt="x", id="x", max_tokens=3, traceparent="00-nonsense", tracestate="a=b")
        assert (await read_reply(redis, "x")).end.finish_reason == "length"
        [root] = await ended(worker, "request q")
    assert root.trace_id != TRACE_ID
    assert root.parent_id is None
    assert root.state == ""


async def test_what_is_not_sampled_leaves_nothing(redis_url: str, redis: RedisClient) -> None:
    worker = InMemory.of("worker")
    async with running_worker(redis_url, telemetry=worker.telemetry):
        await send(redis, prompt="x", id="x", max_tokens=3, traceparent=UNSAMPLED)
        await send(redis, prompt="y", id="y", max_tokens=3, traceparent=TRACEPARENT)
        for request_id in ("x", "y"):
            await read_reply(redis, request_id)
        await ended(worker, "process q")
    assert {span.attributes["penstock.request.id"] for span in worker.spans} == {"y"}


async def test_a_sampler_of_the_environment_decides(
    redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole chain follows it: a client that samples nothing says so to the worker."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    client_sees = InMemory.of("client")
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    worker = InMemory.of("worker")
    async with (
        running_worker(redis_url, telemetry=worker.telemetry),
        AsyncClient(redis_url, queue="q", tracing=client_sees.provider) as client,
    ):
        reply = await client.generate("x", max_tokens=3)
        assert len(reply.tokens) == 3
        await eventually(lambda: is_queue_empty(redis))
    assert client_sees.spans + worker.spans == []


async def test_no_span_has_a_word_of_any_text(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    """Prompts, replies, stop strings, tools, and errors that quote them are looked for in what goes over the wire."""
    tool = {"type": "function", "function": {"name": f"{SECRET}_tool", "description": SECRET}}
    messages: Any = [{"role": "user", "content": SECRET}]
    with Collector() as collector:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in collector.environment.items():
                patch.setenv(name, value)
            patch.setenv("OTEL_METRICS_EXPORTER", "none")
            gateway, worker, sender = (from_environment(name) for name in ("gateway", "worker", "client"))
        async with (
            running_worker(redis_url, telemetry=worker),
            running_gateway(redis_url, telemetry=gateway) as served,
            httpx2.AsyncClient(base_url=served.url, timeout=WAIT_S) as http,
            AsyncClient(redis_url, queue="q", tracing=sender.provider or False) as client,
        ):
            body = {"model": "q", "messages": messages, "max_tokens": 3, "stop": [SECRET], "tools": [tool]}
            assert (await http.post(CHAT, json=body)).status_code == 200
            assert (await http.post(CHAT, json={**body, "max_tokens": SECRET})).status_code == 400
            assert (await http.post(f"/{SECRET}?{SECRET}", json=body)).status_code == 404
            await client.generate(SECRET, max_tokens=3, stop=[SECRET], id="ok")
            with pytest.raises(Exception, match="assistant"):
                await client.generate([{"role": "assistant", "content": SECRET}], max_tokens=3)
            await send(redis, prompt=SECRET, id="bad", max_tokens=SECRET)
            assert SECRET in ((await read_reply(redis, "bad")).end.message or "")
            replies = [SECRET, (await read_reply(redis, "ok")).text()]
            await eventually(lambda: is_queue_empty(redis))
        await asyncio.to_thread(sender.close)
    assert len(collector.named("process q")) == 4
    assert len(collector.named("chat q")) == 2
    path, *others = [span.attributes.pop("url.path", "") for span in collector.named("POST")]
    assert (path, others) == (f"/{SECRET}", [])
    bodies = b"".join(collector.bodies).replace(f"/{SECRET}".encode(), b"")
    assert not [text for text in replies if text.encode() in bodies]


class Broken(SpanProcessor):
    """A span processor that raises where it can."""

    def on_start(self, span: Span, parent_context: object = None) -> None:
        if not span.name.startswith(("process", "prefill")):
            raise RuntimeError("no span today")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("nor the end of one")


async def test_tracing_that_breaks_ends_nothing_else(
    redis_url: str, redis: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())
    telemetry = Telemetry(Resource({}), provider, None)
    async with (
        running_worker(redis_url, telemetry=telemetry) as running,
        running_gateway(redis_url, telemetry=telemetry) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=WAIT_S) as http,
    ):
        body = {"model": "q", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 2}
        for _ in range(2):
            assert (await http.post(CHAT, json=body)).status_code == 200
        await eventually(lambda: is_queue_empty(redis))
        await running.drain()
        assert running.task.exception() is None
    warnings = [record for record in caplog.records if record.name == "penstock.telemetry"]
    assert 1 <= len(warnings) <= 3  # the worker's, the gateway's, and its client's


async def test_no_collector_is_no_trouble(redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at port 1. The worker drains all the same, and its spans are lost."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    async with running_worker(redis_url, telemetry=from_environment("worker")) as running:
        await send(redis, prompt="x", id="x", max_tokens=3)
        await read_reply(redis, "x")
        await running.drain()
        assert running.task.exception() is None


async def test_a_request_that_is_given_up_ends_its_trace(redis_url: str, redis: RedisClient) -> None:
    """Nobody claims it again, so nobody else would end the trace."""
    worker, engine = InMemory.of("worker"), FakeEngine()
    engine.hold()
    async with running_worker(redis_url, engine, telemetry=worker.telemetry):
        await send(redis, prompt="x", id="taken", max_tokens=50)
        await eventually(lambda: engine.prefilled == ["taken"])
        await redis.set(keys.reply("q", "taken"), "something else")
        engine.allow()
        await eventually(lambda: is_queue_empty(redis))
    for name in ("process q", "request q"):
        [span] = worker.named(name)
        assert (span.is_error, span.attributes["error.type"]) == (True, "reply_unwritable")
