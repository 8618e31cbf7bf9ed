"""Requests sent again give one generation, whoever asks and however often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, until_cancelled
from tests.support.programs.gateway_client import CHAT, bare_client, chat, events_of, read_events, text_of
from tests.support.programs.gateway_harness import CARD, announce, running_gateway

KEY = {"Idempotency-Key": "k"}


async def three_words(reply: ScriptedReply) -> None:
    await reply.own()
    for word in ("one ", "two ", "three"):
        await reply.chunk(word)
    await reply.end()


@pytest.fixture
async def worker(redis: RedisClient, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    await announce(redis)
    async with ScriptedWorker(redis_url, three_words) as worker:
        yield worker


@asynccontextmanager
async def two_gateways(redis_url: str) -> AsyncIterator[Any]:
    async with (
        running_gateway(redis_url) as one,
        running_gateway(redis_url) as other,
        bare_client(one, other) as clients,
    ):
        yield clients


async def test_a_request_that_is_sent_again_gets_the_same_bytes_from_any_gateway(
    redis_url: str, worker: ScriptedWorker
) -> None:
    async with two_gateways(redis_url) as clients:
        answers = [await client.post(CHAT, json=chat(stream=True), headers=KEY) for client in clients for _ in range(2)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert text_of(events_of(answers[0].text)) == "one two three"
    assert len(worker.taken) == 1


async def test_a_retry_joins_what_still_runs_in_the_form_that_it_asks_for(
    redis_url: str, worker: ScriptedWorker
) -> None:
    go_on = asyncio.Event()

    async def in_two_parts(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("first ")
        await go_on.wait()
        await reply.chunk("second")
        await reply.end()

    worker.behave = in_two_parts
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        async with client.stream("POST", CHAT, json=chat(stream=True), headers=KEY) as response:
            events = read_events(response)
            first = await anext(events)
            whole = asyncio.create_task(client.post(CHAT, json=chat(), headers=KEY))
            done, _ = await asyncio.wait([whole], timeout=0.1)
            assert not done
            go_on.set()
            assert text_of([first, *[event async for event in events]]) == "first second"
        assert (await whole).json()["choices"][0]["message"]["content"] == "first second"
    assert len(worker.taken) == 1


@pytest.mark.parametrize("same", [{}, {"seed": None}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_the_form_of_an_answer_is_no_part_of_what_is_asked_for(
    redis_url: str, worker: ScriptedWorker, same: dict[str, Any]
) -> None:
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
        assert (await client.post(CHAT, json=chat(**same), headers=KEY)).status_code == 200
    assert len(worker.taken) == 1


async def test_a_key_belongs_to_one_request(redis: RedisClient, redis_url: str, worker: ScriptedWorker) -> None:
    await announce(redis, "other")
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
        for body in (chat("another"), chat(max_tokens=7), chat() | {"model": "other"}):
            refused = await client.post(CHAT, json=body, headers=KEY)
            assert refused.status_code == 422
            assert refused.json()["error"]["code"] == "idempotency_key_reused"
            assert refused.headers["x-should-retry"] == "false"
        assert (await client.post(CHAT, json=chat("another"), headers={"Idempotency-Key": "l"})).status_code == 200
    assert [request.messages[0].content for request in worker.taken if request.messages] == ["hello", "another"]


async def test_after_its_reply_has_expired_a_retry_is_told_so(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker
) -> None:
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
        await eventually(lambda: _is_empty(redis))
        await redis.delete(keys.reply("default", worker.taken[0].id or ""))
        await redis.delete(keys.state("default", worker.taken[0].id or ""))
        for is_streamed in (True, False):
            gone = await client.post(CHAT, json=chat(stream=is_streamed), headers=KEY)
            assert gone.status_code == 409
            assert gone.json()["error"]["code"] == "reply_expired"
    assert len(worker.taken) == 1


async def test_a_stream_goes_on_behind_any_of_its_events(redis_url: str, worker: ScriptedWorker) -> None:
    async with two_gateways(redis_url) as (first, second):
        whole = (await first.post(CHAT, json=chat(stream=True), headers=KEY)).text
        events = events_of(whole)
        for number, event in enumerate(events, 1):
            rest = await second.post(CHAT, json=chat(stream=True), headers={**KEY, "Last-Event-ID": event.id})
            assert rest.status_code == 200
            assert events_of(rest.text) == events[number:]
            assert whole.endswith(rest.text)
    assert len(events) >= 4
    assert len(worker.taken) == 1


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"Idempotency-Key": ""}, "Idempotency-Key"),
        ({"Idempotency-Key": "k" * 256}, "Idempotency-Key"),
        ({"Idempotency-Key": "kä"}, "Idempotency-Key"),
        ({"Last-Event-ID": "1-1.0"}, "Last-Event-ID"),
        ({**KEY, "Last-Event-ID": "1-1"}, "Last-Event-ID"),
        ({**KEY, "Last-Event-ID": "latest"}, "Last-Event-ID"),
        ({**KEY, "Last-Event-ID": "9999999999999999-1.0"}, "Last-Event-ID"),
    ],
)
async def test_a_key_or_a_place_that_is_none_is_refused(
    redis_url: str, worker: ScriptedWorker, headers: dict[str, str], param: str
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        refused = await client.post(CHAT, json=chat(stream=True), headers=raw)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_who_goes_on_starts_nothing(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker, path: str, fields: dict[str, bool]
) -> None:
    """The key was used for nothing, or its answer was lost with Redis's data."""
    body = {"model": "tiny", "input": "hello"} if path == "/v1/responses" else chat("hello", max_tokens=9)
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        whole = await client.post(CHAT, json=chat(stream=True), headers={"Idempotency-Key": "another"})
        known = set(await redis.keys())
        going_on = {**KEY, "Last-Event-ID": events_of(whole.text)[1].id}
        refused = await client.post(path, json={**body, **fields}, headers=going_on)
        assert refused.status_code == 400, refused.text
        assert "no answer to go on with" in refused.text
        assert set(await redis.keys()) <= known
        answer = await client.post(path, json=body, headers=KEY)
        assert answer.status_code == 200
    assert len(worker.taken) == 2


async def test_who_goes_on_behind_what_was_not_written_so_far_is_refused(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker
) -> None:
    worker.behave = until_cancelled
    async with (
        running_gateway(redis_url) as gateway,
        bare_client(gateway) as client,
        client.stream("POST", CHAT, json=chat(stream=True), headers=KEY) as response,
    ):
        first = await anext(read_events(response))
        entry = (first.id or "").partition(".")[0]
        epoch = int(entry.partition("-")[0])
        for event_id in ("999-1.0", f"{epoch}-999.0", f"{epoch + 1}-1.0", f"{entry}.7", "0-0.0"):
            place = {**KEY, "Last-Event-ID": event_id}
            refused = await client.post(CHAT, json=chat(stream=True), headers=place)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_event_id")
    assert len(worker.taken) == 1


async def _is_empty(redis: RedisClient) -> bool:
    return await redis.xlen(keys.requests("default")) == 0


async def test_a_key_goes_with_the_number_of_prompts(redis_url: str, worker: ScriptedWorker) -> None:
    async with two_gateways(redis_url) as clients:
        statuses = []
        for client, prompts in zip([*clients, *clients], (["a", "b"], ["a"], ["a", "b", "c"], ["a", "b"]), strict=True):
            body = {"model": "tiny", "prompt": prompts}
            statuses.append((await client.post("/v1/completions", json=body, headers=KEY)).status_code)
    assert statuses == [200, 422, 422, 200]
    assert len(worker.taken) == 2


async def test_a_request_without_max_tokens_is_the_same_whichever_worker_s_card_is_there(
    redis: RedisClient, redis_url: str, worker: ScriptedWorker
) -> None:
    async with running_gateway(redis_url) as one, bare_client(one) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
    await announce(redis, card=CARD.model_copy(update={"max_model_len": 2048}))
    async with running_gateway(redis_url) as other, bare_client(other) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
        for other_length in (2047, 256):
            refused = await client.post(CHAT, json=chat(max_tokens=other_length), headers=KEY)
            assert refused.status_code == 422
    assert len(worker.taken) == 1
