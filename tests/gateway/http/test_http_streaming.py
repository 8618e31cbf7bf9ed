"""A reply as a stream of events: when the status is sent, what comes during silence, and how the stream ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette

from penstock.gateway.errors import ApiError, api_error, ended_early
from penstock.gateway.http.events import BEFORE_ALL, Place, ServerSentEvent, encode, place_of
from penstock.gateway.http.interruptions import Interruption
from penstock.gateway.http.streaming import EventStream
from penstock.producer import AsyncClient, Chunk, Reply
from penstock.protocol.wire import ChunkEntry
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import events_of

FOREVER_S = 10_000.0


class Words:
    """Writes texts, and `end`."""

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent]:
        if chunk.text == "bug":
            raise KeyError(chunk.text)
        yield ServerSentEvent(chunk.text)
        yield ServerSentEvent("same entry")

    def end(self, reply: Reply) -> Iterable[ServerSentEvent]:
        if reply.finish_reason != "stop":
            raise ended_early(reply.finish_reason)
        yield ServerSentEvent("end")

    def error(self, error: ApiError) -> Iterable[ServerSentEvent]:
        yield ServerSentEvent(f"{error.status} {error.code}", "error")


@dataclass
class Sent:
    """The messages that a server would have got, and how it behaves."""

    status: int | None = None
    body: str = ""
    has_ended: bool = False
    is_open: asyncio.Event = field(default_factory=asyncio.Event)  # not set: the client reads nothing
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Any) -> None:
        await self.is_open.wait()
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
        else:
            assert self.status is not None
            self.body += message["body"].decode()
            self.has_ended = not message.get("more_body")

    async def receive(self) -> Any:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    @property
    def data(self) -> list[str]:
        return [event.data for event in events_of(self.body)]


@dataclass
class Streaming:
    sent: Sent
    interruption: Interruption
    task: asyncio.Task[None]


@asynccontextmanager
async def streaming(
    url: str,
    behave: Callable[[ScriptedReply], Awaitable[None]],
    *,
    commit_after_s: float = FOREVER_S,
    ping_interval_s: float = FOREVER_S,
    after: Place = BEFORE_ALL,
) -> AsyncIterator[Streaming]:
    async with ScriptedWorker(url, behave), AsyncClient(url) as client:
        interruption, sent = Interruption(), Sent()
        sent.is_open.set()
        stream = EventStream(
            client.stream("x"),
            Words(),
            reading=nullcontext(),
            interruption=interruption,
            told=api_error,
            commit_after_s=commit_after_s,
            ping_interval_s=ping_interval_s,
            after=after,
        )
        app = Starlette()
        app.state.error_forms = {}
        scope = {"type": "http", "path": "/", "app": app, "state": {}}
        task = asyncio.create_task(stream(scope, sent.receive, sent.send))
        yield Streaming(sent, interruption, task)
        sent.is_gone.set()
        await task


async def word(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("word")
    await reply.end()


async def word_and_no_end(reply: ScriptedReply) -> None:
    await reply.own()
    await reply.chunk("word")


async def nothing(reply: ScriptedReply) -> None:
    await reply.own()


async def test_events_have_the_places_of_their_entries(redis_url: str) -> None:
    async with streaming(redis_url, word) as stream:
        await stream.task
    assert stream.sent.status == 200
    assert [(event.id, event.data) for event in events_of(stream.sent.body)] == [
        ("1-1.0", "word"),
        ("1-1.1", "same entry"),
        ("1-2.0", "end"),
    ]


@pytest.mark.parametrize(
    ("after", "data"),
    [("1-1.0", ["same entry", "end"]), ("1-1.1", ["end"]), ("1-2.0", [])],
)
async def test_a_stream_goes_on_behind_an_event(redis_url: str, after: str, data: list[str]) -> None:
    async with streaming(redis_url, word, after=place_of(after)) as stream:
        await stream.task
    assert (stream.sent.status, stream.sent.data, stream.sent.has_ended) == (200, data, True)


@pytest.mark.parametrize("after", ["0-0.0", "0-7.0", "1-0.0", "1-1.2", "1-2.1", "1-3.0", "2-1.0"])
async def test_behind_what_is_no_event_of_the_reply_there_is_nothing(redis_url: str, after: str) -> None:
    async with streaming(redis_url, word, commit_after_s=0.0, ping_interval_s=0.0, after=place_of(after)) as stream:
        await stream.task
    assert (stream.sent.status, stream.sent.has_ended) == (400, True)
    assert json.loads(stream.sent.body)["error"] == {
        "message": f"Last-Event-ID: '{after}' is not an event of this answer",
        "type": "invalid_request_error",
        "param": "Last-Event-ID",
        "code": "invalid_event_id",
    }


async def test_comments_go_on_behind_an_event(redis_url: str) -> None:
    after = place_of("1-1.1")
    async with streaming(redis_url, word_and_no_end, commit_after_s=0.01, ping_interval_s=0.01, after=after) as stream:
        await eventually(lambda: stream.sent.body.count(": ping\n\n") >= 3)
    assert (stream.sent.status, stream.sent.data) == (200, [])


async def test_what_ends_before_the_first_event_has_a_status_of_its_own(redis_url: str) -> None:
    async def refuse(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end("error", code="too_long", message="prompt: too long")

    async with streaming(redis_url, refuse) as stream:
        await stream.task
    assert (stream.sent.status, stream.sent.has_ended) == (400, True)
    assert '"context_length_exceeded"' in stream.sent.body


@pytest.mark.parametrize(
    ("reason", "code", "event"),
    [
        ("error", "internal", "500 internal_error"),
        ("cancelled", None, "409 cancelled"),
        ("expired", None, "408 expired"),
    ],
)
async def test_what_goes_wrong_later_is_an_event(redis_url: str, reason: str, code: str | None, event: str) -> None:
    async def fail(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("word")
        await reply.end(reason, code=code, message="m" if code else None)

    async with streaming(redis_url, fail) as stream:
        await stream.task
    assert (stream.sent.status, stream.sent.has_ended) == (200, True)
    assert stream.sent.data == ["word", "same entry", event]


async def test_a_writer_that_breaks_is_an_error_of_that_stream(redis_url: str) -> None:
    async def break_it(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("word")
        await reply.chunk("bug")

    async with streaming(redis_url, break_it) as stream:
        await stream.task
    assert stream.sent.data == ["word", "same entry", "500 internal_error"]
    assert stream.sent.has_ended


async def test_the_status_does_not_wait_for_ever_and_comments_keep_the_connection(redis_url: str) -> None:
    async with streaming(redis_url, nothing, commit_after_s=0.01, ping_interval_s=0.01) as stream:
        await eventually(lambda: stream.sent.body.count(": ping\n\n") >= 3)
    assert stream.sent.status == 200
    assert not stream.sent.data


async def test_comments_say_how_far_a_long_prompt_is_once_the_status_is_sent(redis_url: str) -> None:
    sent: list[Sent] = []

    async def slowly(reply: ScriptedReply) -> None:
        await reply.own()
        for done in (100, 200, 300):
            await reply.write(ChunkEntry(index=0, offset=0, text="", tokens=(), prefill_done=done, prefill_total=300))
            await eventually(lambda done=done: sent and f": prefill {done}/300\n\n" in sent[0].body)
        await reply.chunk("word")
        await reply.end()

    async with streaming(redis_url, slowly, commit_after_s=0.01) as stream:
        sent.append(stream.sent)
        await stream.task
    assert stream.sent.status == 200
    assert stream.sent.body.partition("id:")[0].rpartition(": prefill")[2] == " 300/300\n\n"
    assert stream.sent.data == ["word", "same entry", "end"]


@pytest.mark.parametrize(("behave", "status"), [(nothing, 503), (word_and_no_end, 200)])
async def test_an_interruption_has_a_status_or_is_an_event(
    redis_url: str, behave: Callable[[ScriptedReply], Awaitable[None]], status: int
) -> None:
    async with streaming(redis_url, behave) as stream:
        await eventually(lambda: stream.sent.data or behave is nothing)
        stream.interruption.end(ApiError(503, "draining", code="draining"))
        await stream.task
    assert (stream.sent.status, stream.sent.has_ended) == (status, True)
    assert ("event: error\ndata: 503 draining" in stream.sent.body) == (status == 200)


async def test_a_client_that_reads_nothing_and_goes_ends_the_stream(redis_url: str) -> None:
    async with streaming(redis_url, word, commit_after_s=0.01, ping_interval_s=0.01) as stream:
        stream.sent.is_open.clear()
        stream.interruption.end(ApiError(503, "draining"))
        stream.sent.is_gone.set()
        await stream.task
    assert stream.sent.status is None


@pytest.mark.parametrize("event_id", ["", "1-1", "1.0", "-1.0", "1-1.x", "1-1.-1", "1-1.0.0", "²-1.0"])
def test_what_is_no_place_is_refused(event_id: str) -> None:
    with pytest.raises(ValueError, match="not the id of an event"):
        place_of(event_id)


def test_a_writer_gives_all_its_events_whichever_are_sent() -> None:
    given = []

    def events() -> Iterable[ServerSentEvent]:
        for number in range(3):
            given.append(number)
            yield ServerSentEvent(str(number))

    assert encode(events(), "5-1", (5, 2, 0)) == b""
    assert encode(events(), "5-1", (5, 1, 1)) == b"id: 5-1.2\ndata: 2\n\n"
    assert given == [0, 1, 2, 0, 1, 2]
