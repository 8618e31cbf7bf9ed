"""A response as events, in order, with numbers that any replica gives, and resumed from any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.responses.responses_harness import Asked, answer, asking, events_of
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_harness import CARD, announce

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
SAID = {
    "say": "say two words",
    "think": "think hello",
    "call": "call weather",
    "cut": "cut here",
    "break": "break here",
    "nothing": "refuse it",
}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


async def ended(asked: Asked, response_id: str) -> bool:
    return (await asked.openai.responses.retrieve(response_id)).status not in ("queued", "in_progress")


def types_of(text: str) -> list[str]:
    return [event.type.removeprefix("response.") for event in events_of(text)]


async def test_text_comes_in_order(asked: Asked) -> None:
    text = (await asked.post("say two words", stream=True)).text
    assert types_of(text) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    events = events_of(text)
    assert [event.sequence_number for event in events] == list(range(10))
    assert [event.delta for event in events[4:6]] == ["two", " words"]
    final = await asked.openai.responses.retrieve(events[0].response.id)
    assert events[-1].response.model_dump() == final.model_dump()
    assert events[0].response.status == events[1].response.status == "in_progress"


async def test_reasoning_and_calls_are_items_of_their_own(asked: Asked) -> None:
    thought = (await asked.post("think hello", stream=True)).text
    assert types_of(thought)[2:13] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    ]  # fmt: skip
    called = (await asked.post("call weather", stream=True, tools=[WEATHER])).text
    assert types_of(called)[8:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.output_index for event in events_of(called) if hasattr(event, "output_index")][-4:] == [2] * 4


@pytest.mark.parametrize("what", SAID)
async def test_a_stream_can_be_read_again_from_any_event_on_through_any_gateway(
    asked: Asked, redis: RedisClient, redis_url: str, what: str
) -> None:
    """The stream is the same byte for byte."""
    first = (await asked.post(SAID[what], stream=True, background=True)).text
    response_id = events_of(first)[0].response.id
    async with Asked.beside(asked.worker, redis, redis_url) as other:
        assert await other.stream_of(response_id) == first
        blocks = first.split("\n\n")[:-1]
        for number, block in enumerate(blocks):
            rest = "".join(f"{each}\n\n" for each in blocks[number + 1 :])
            assert await other.stream_of(response_id, starting_after=number) == rest
            if block.startswith("id: "):
                headers = {"Last-Event-ID": block.partition("\n")[0].removeprefix("id: ")}
                url = f"/v1/responses/{response_id}?stream=true"
                assert (await other.http.get(url, headers=headers)).text == rest
    assert events_of(first)[-1].type == {"cut": "response.incomplete"}.get(
        what, "response.failed" if what in ("break", "nothing") else "response.completed"
    )


async def test_a_foreground_stream_is_the_same_when_it_is_read_again(asked: Asked) -> None:
    first = (await asked.post("think hello", stream=True)).text
    assert await asked.stream_of(events_of(first)[0].response.id) == first


async def test_one_in_the_background_is_announced_before_a_worker_takes_it(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with Asked.beside(None, redis, redis_url) as asked:
        stream = await asked.openai.responses.create(model="tiny", input="wait here", background=True, stream=True)
        events: list[Any] = [await anext(stream), await anext(stream)]
        assert [event.type for event in events] == ["response.created", "response.queued"]
        await stream.close()
        waiting: Any = await asked.openai.responses.retrieve(events[0].response.id)
        assert (waiting.status, waiting.output) == ("queued", [])


async def test_one_in_the_background_waits_for_a_worker_where_there_was_one(redis: RedisClient, redis_url: str) -> None:
    """After `penstock drain`, the queue's workers have taken its card with them."""
    await announce(redis)
    async with Asked.beside(None, redis, redis_url) as asked:
        await asked.http.get("/v1/models")
        await redis.delete(keys.card("default"), keys.queues())
        await eventually(lambda: _serves_nothing(asked))
        for key in ("one", "other"):
            refused = await asked.post("say it", {"Idempotency-Key": key}, stream=key == "other")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        made = [await asked.post(f"say {name}", background=True, model=name) for name in ("tiny", "default")]
        assert [(answer.status_code, answer.json()["status"]) for answer in made] == [(200, "queued")] * 2
        async with ScriptedWorker(redis_url, answer):
            for name, response in zip(("tiny", "default"), made, strict=True):
                text = await asked.stream_of(response.json()["id"])
                assert events_of(text)[-1].response.output[0].content[0].text == name


async def test_one_in_the_background_needs_a_model_that_the_gateway_has_seen(
    redis: RedisClient, redis_url: str
) -> None:
    async with Asked.beside(None, redis, redis_url) as asked:
        refused = await asked.post("say it", background=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    await announce(redis, "other", CARD.model_copy(update={"model": "other"}))
    for queues, expected in (((), (404, "model_not_found")), (("tiny", "other"), (503, "no_worker"))):
        async with Asked.beside(None, redis, redis_url, queues=queues) as asked:
            refused = await asked.post("say it", background=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == expected


async def _serves_nothing(asked: Asked) -> bool:
    return not (await asked.http.get("/v1/models")).json()["data"]


async def test_one_that_nobody_follows_any_more_goes_on_in_the_background(asked: Asked) -> None:
    stream = await asked.openai.responses.create(model="tiny", input="wait here", background=True, stream=True)
    created: Any = await anext(stream)
    await stream.close()
    follower = await asked.openai.responses.retrieve(created.response.id, stream=True, starting_after=1)
    assert (await anext(follower)).type == "response.in_progress"
    await follower.close()
    assert not await asked.redis.exists(keys.cancel("default", asked.requests[0].id or ""))
    cancelled = await asked.openai.responses.cancel(created.response.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "here")
    assert (await asked.openai.responses.cancel(created.response.id)).status == "cancelled"


async def test_one_in_the_foreground_ends_with_its_client(asked: Asked) -> None:
    stream = await asked.openai.responses.create(model="tiny", input="wait here", stream=True)
    created: Any = await anext(stream)
    await stream.close()
    await eventually(lambda: ended(asked, created.response.id))
    assert (await asked.openai.responses.retrieve(created.response.id)).status == "cancelled"
    waiting = asyncio.create_task(asked.create("wait here"))
    await eventually(lambda: len(asked.requests) == 2)
    waiting.cancel()
    await eventually(lambda: asked.redis.exists(keys.cancel("default", asked.requests[1].id or "")))


async def test_a_stream_that_is_cancelled_ends_as_incomplete(asked: Asked) -> None:
    stream = await asked.openai.responses.create(model="tiny", input="wait here", background=True, stream=True)
    created: Any = await anext(stream)
    await asked.openai.responses.cancel(created.response.id)
    last: Any = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert last.response.output[0].status == "incomplete"


async def test_a_status_tells_what_goes_wrong_before_the_first_event(asked: Asked) -> None:
    for text, status in (("refuse it", 400), ("expire now", 408)):
        answer = await asked.post(text, stream=True)
        assert answer.status_code == status, answer.text
    await eventually(lambda: nothing_is_kept(asked))


async def nothing_is_kept(asked: Asked) -> bool:
    return not await asked.redis.keys("penstock:gateway:*response*")


async def test_what_goes_wrong_after_the_first_event_is_the_last_event(asked: Asked) -> None:
    events = events_of((await asked.post("break here", stream=True)).text)
    assert [event.type.removeprefix("response.") for event in events[-3:]] == [
        "content_part.done", "output_item.done", "failed",
    ]  # fmt: skip
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "engine broke" in failed.error.message
    assert (await asked.openai.responses.retrieve(failed.id)).model_dump() == failed.model_dump()


async def test_one_that_is_not_stored_begins_when_its_reply_does(asked: Asked) -> None:
    headers = {"Idempotency-Key": "once"}
    first = await asked.post("say two words", headers, stream=True, store=False)
    assert events_of(first.text)[0].response.created_at == 1_795_298_400
    again = await asked.post("say two words", headers, stream=True, store=False)
    assert again.text == first.text
    place = first.text.split("\n\n")[4].partition("\n")[0].removeprefix("id: ")
    rest = await asked.post("say two words", {**headers, "Last-Event-ID": place}, stream=True, store=False)
    assert rest.text == "".join(f"{block}\n\n" for block in first.text.split("\n\n")[5:-1])


async def test_the_helper_of_the_client_understands_the_events(asked: Asked) -> None:
    async with asked.openai.responses.stream(model="tiny", input="call weather", tools=[WEATHER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    async with asked.openai.responses.stream(response_id=final.id, starting_after=5) as again:
        first = await anext(aiter(again))
        assert first.sequence_number == 6


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"starting_after": "x"}, "starting_after"),
        ({"starting_after": "-2"}, "starting_after"),
        ({"stream": "x"}, "stream"),
    ],
)
async def test_a_query_that_is_wrong_is_refused_by_name(asked: Asked, query: dict[str, str], param: str) -> None:
    response = await asked.create("say it")
    answer = await asked.http.get(f"/v1/responses/{response.id}", params={"stream": "true", **query})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("what", SAID)
async def test_behind_what_is_no_event_of_a_response_there_is_nothing(asked: Asked, what: str) -> None:
    events = events_of((await asked.post(SAID[what], stream=True, background=True)).text)
    assert events[0].type == "response.created"
    await refuses_to_go_on(asked, events[0].response.id, num_events=len(events))


async def test_behind_what_a_response_has_not_said_so_far_there_is_nothing(asked: Asked) -> None:
    stream = await asked.openai.responses.create(model="tiny", input="wait here", background=True, stream=True)
    events = [await anext(stream) for _ in range(6)]
    assert events[-1].type == "response.output_text.delta"
    assert events[0].type == "response.created"
    await refuses_to_go_on(asked, events[0].response.id, num_events=6)
    await asked.openai.responses.cancel(events[0].response.id)
    assert len([event async for event in stream]) > 1


async def test_behind_what_a_waiting_response_has_not_said_there_is_nothing(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with Asked.beside(None, redis, redis_url) as asked:
        created = await asked.openai.responses.create(model="tiny", input="wait here", background=True)
        await refuses_to_go_on(asked, created.id, num_events=2)


async def refuses_to_go_on(asked: Asked, response_id: str, *, num_events: int) -> None:
    for number in (num_events, num_events + 7):
        query = {"stream": "true", "starting_after": str(number)}
        answer = await asked.http.get(f"/v1/responses/{response_id}", params=query)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_event_id", "starting_after")
    for place in ("0-0.7", "999-1.0", "9999999999999999-1.0"):
        headers = {"Last-Event-ID": place}
        answer = await asked.http.get(f"/v1/responses/{response_id}?stream=true", headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_event_id", "Last-Event-ID")


async def test_a_stream_of_what_is_not_there_is_not_found(asked: Asked) -> None:
    with pytest.raises(openai.NotFoundError):
        await asked.openai.responses.retrieve("resp_none", stream=True)
