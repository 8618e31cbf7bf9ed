"""Spans that a client records, with the application's provider and a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock.producer import AsyncClient, Client, GenerateRequest, QueueFull, RequestFailed
from tests.support.otlp_collector import Seen
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, one_word, until_cancelled

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traces:
    """A provider, and the spans that have come to it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> Seen:
        [found] = [span for span in self.spans if span.name == name]
        return found

    @property
    def spans(self) -> list[Seen]:
        return [Seen.of(span) for span in self._exporter.get_finished_spans()]


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.provider.shutdown()


async def failing(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("x")
    await reply.end("error", code="engine_error", message="quotes the SECRET")


async def test_a_request_is_below_what_the_application_is_doing(redis_url: str, traces: Traces) -> None:
    async with (
        ScriptedWorker(redis_url, one_word) as worker,
        AsyncClient(redis_url, tracing=traces.provider) as client,
    ):
        with traces.provider.get_tracer("app").start_as_current_span("app"):
            await client.generate("hello", max_tokens=9, seed=3)
            await asyncio.gather(client.generate("a"), client.on("default").generate("b"))
            handle = await client.submit([{"role": "user", "content": "x"}])
        await handle.result()
        sent = [request.traceparent for request in worker.taken]
    app = traces.named("app")
    assert {span.trace_id for span in traces.spans} == {app.trace_id}
    sends = [span for span in traces.spans if span.name == "send default"]
    assert sent == [f"00-{span.trace_id}-{span.span_id}-03" for span in sends]
    chats = [span for span in traces.spans if span.name == "text_completion default"]
    assert [span.parent_id for span in chats] == [app.span_id] * 3
    assert [span.parent_id for span in sends[:1]] == [chats[0].span_id]
    assert sends[-1].parent_id == app.span_id  # nobody followed this one with the span
    assert chats[0].attributes["gen_ai.request.seed"] == 3
    assert chats[0].attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert chats[0].attributes["gen_ai.usage.output_tokens"] == 4


async def test_a_request_that_names_a_trace_is_part_of_that_one(redis_url: str, traces: Traces) -> None:
    request = GenerateRequest(prompt="x", traceparent=TRACEPARENT, tracestate="a=b")
    async with (
        ScriptedWorker(redis_url, one_word) as worker,
        AsyncClient(redis_url, tracing=traces.provider) as client,
    ):
        with traces.provider.get_tracer("app").start_as_current_span("app"):
            await client.generate(request)
    chat = traces.named("text_completion default")
    assert (chat.trace_id, chat.parent_id) == tuple(TRACEPARENT.split("-")[1:3])
    assert worker.taken[0].tracestate == "a=b"


async def test_the_providers_of_the_application_are_asked_by_their_global_name(
    redis_url: str, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", traces.provider)
    async with ScriptedWorker(redis_url, one_word), AsyncClient(redis_url, tracing=True) as client:
        await client.generate("x")
    assert traces.named("send default").parent_id == traces.named("text_completion default").span_id


def test_threads_keep_what_they_are_doing(redis_url: str, traces: Traces) -> None:
    """The blocking client works in a thread of its own."""

    async def serve() -> None:
        async with ScriptedWorker(redis_url, one_word):
            await asyncio.to_thread(ask)

    def ask() -> None:
        with (
            Client(redis_url, tracing=traces.provider) as client,
            traces.provider.get_tracer("app").start_as_current_span("app"),
        ):
            client.generate("a")
            assert "".join(chunk.text for chunk in client.stream("b")) == "word"
            assert [result.text for result in client.map(["c"])] == ["word"]

    asyncio.run(serve())
    app = traces.named("app")
    chats = [span for span in traces.spans if span.name == "text_completion default"]
    assert [span.parent_id for span in chats] == [app.span_id] * 3


async def test_errors_are_named_and_not_quoted(redis_url: str, traces: Traces) -> None:
    async with ScriptedWorker(redis_url, failing), AsyncClient(redis_url, tracing=traces.provider) as client:
        with pytest.raises(RequestFailed):
            await client.generate("SECRET", stop=["SECRET"])
    chat = traces.named("text_completion default")
    assert (chat.is_error, chat.attributes["error.type"]) == (True, "engine_error")
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert "SECRET" not in repr(traces.spans)


async def test_a_full_queue_is_an_error_of_the_sending(redis_url: str, traces: Traces) -> None:
    async with AsyncClient(redis_url, max_queue_length=1, tracing=traces.provider) as client:
        await client.submit("x")
        with pytest.raises(QueueFull):
            await client.submit("y")
    assert [span.attributes.get("error.type") for span in traces.spans] == [None, "QueueFull"]


async def test_a_reader_that_leaves_is_no_error(redis_url: str, traces: Traces) -> None:
    async with (
        ScriptedWorker(redis_url, until_cancelled),
        AsyncClient(redis_url, tracing=traces.provider) as client,
    ):
        async with client.stream("x") as stream:
            await anext(stream)
        task = asyncio.create_task(client.generate("y"))
        await eventually(lambda: len([span for span in traces.spans if span.name == "send default"]) == 2)
        task.cancel()
        await asyncio.wait({task})
    left = [span for span in traces.spans if span.name == "text_completion default"]
    assert [(span.is_error, span.attributes["penstock.outcome"]) for span in left] == [(False, "left")] * 2


async def test_a_stream_that_nobody_begins_is_no_span(redis_url: str, traces: Traces) -> None:
    async with AsyncClient(redis_url, tracing=traces.provider) as client:
        await client.stream("x").aclose()
    assert traces.spans == []


async def test_what_is_not_sampled_is_said_to_the_worker(redis_url: str) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    async with ScriptedWorker(redis_url, one_word) as worker, AsyncClient(redis_url, tracing=provider) as client:
        await client.generate("x")
        await client.generate(GenerateRequest(prompt="x", traceparent=TRACEPARENT))
    flags = [int((request.traceparent or "").split("-")[3], 16) & 1 for request in worker.taken]
    assert flags == [0, 0]
