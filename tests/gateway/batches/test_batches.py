"""Batches, from their input to their files, with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from penstock.gateway.batches import results, work
from penstock.gateway.store import names
from penstock.producer import Reply
from penstock.protocol import keys as producer_keys
from penstock.protocol.redis.connection import RedisClient, connect
from tests.gateway.batches.batches_harness import Asked, answer, asking, jsonl, line
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_harness import announce


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


async def test_a_batch_of_chats_from_its_file_to_its_files(asked: Asked) -> None:
    lines = [line("one"), line("two", "think hello"), line("three", "break it"), line("four", n="3")]
    batch = await asked.create(jsonl(lines), metadata={"a": "b"})
    assert (batch.endpoint, batch.completion_window, batch.metadata) == ("/v1/chat/completions", "24h", {"a": "b"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = await asked.ended(batch)
    assert batch.status == "completed"
    assert batch.errors is None
    assert batch.model == "tiny"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    assert batch.usage is not None
    assert (batch.usage.output_tokens, batch.usage.total_tokens) == (9 + 6, 9 + 6)
    for at in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
        assert at is not None
        assert at >= batch.created_at
    good, bad = await asked.lines(batch.output_file_id), await asked.lines(batch.error_file_id)
    assert (set(good), set(bad)) == ({"one", "two"}, {"three", "four"})
    for each in good.values():
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        completion = ChatCompletion.model_validate(each["response"]["body"], strict=True)
        assert completion.id == f"chatcmpl-{each['response']['request_id']}"
    assert good["one"]["response"]["body"]["choices"][0]["message"]["content"] == "two words"
    assert bad["three"]["response"]["status_code"] == 500
    assert bad["four"]["response"]["status_code"] == 400
    assert bad["four"]["response"]["body"]["error"]["param"] == "n"


async def test_lines_go_to_the_queue_with_the_lowest_priority_and_what_is_left_of_the_window(asked: Asked) -> None:
    batch = await asked.ended(await asked.create(jsonl([line("one", priority=7, timeout_s=9000)]), window="2h"))
    assert batch.status == "completed"
    (request,) = asked.requests
    assert request.priority == -1000
    assert request.timeout_s is not None
    assert 7000 < request.timeout_s <= 7200
    assert (request.keep_s, request.tenant) == (86_400, None)


async def test_completions_with_several_prompts(asked: Asked) -> None:
    """Each prompt is a request to the queue."""
    lines = [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": ["one two", "three"]},
        }
    ]
    batch = await asked.ended(await asked.create(jsonl(lines), endpoint="/v1/completions"))
    (found,) = (await asked.lines(batch.output_file_id)).values()
    completion = Completion.model_validate(found["response"]["body"], strict=True)
    assert [choice.text for choice in completion.choices] == ["one two", "three"]


async def test_responses_are_those_of_their_route(asked: Asked) -> None:
    url = "/v1/responses"
    lines = [
        line("a", "think hello", url=url, instructions="Be brief."),
        line("b", url=url, background=True),
        line("c", url=url, previous_response_id="resp_x"),
        line("d", url=url, stream=True),
    ]
    batch = await asked.ended(await asked.create(jsonl(lines), endpoint=url))
    good, bad = await asked.lines(batch.output_file_id), await asked.lines(batch.error_file_id)
    response = Response.model_validate_json(json.dumps(good["a"]["response"]["body"]), strict=True)
    assert (response.status, response.output_text, response.store) == ("completed", "hello", False)  # type: ignore[attr-defined]
    params = {name: each["response"]["body"]["error"]["param"] for name, each in bad.items()}
    assert params == {"b": "background", "c": "previous_response_id", "d": "stream"}


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [(None, "empty_file")]),
        (b"\n \r\n", [(None, "empty_file")]),
        (b"{\n[]\n", [(1, "invalid_json"), (2, "invalid_json")]),
        (b"\xff\n", [(1, "invalid_json")]),
        (jsonl([line("a"), line("b"), line("a")]), [(3, "duplicate_custom_id")]),
        (jsonl([line("a") | {"url": "/v1/completions"}]), [(1, "invalid_url")]),
        (jsonl([line("a") | {"method": "GET"}]), [(1, "invalid_method")]),
        (jsonl([line("a") | {"custom_id": 3}]), [(1, "invalid_value")]),
        (jsonl([line("a") | {"body": []}]), [(1, "invalid_type")]),
        (jsonl([line("a") | {"x": 1}]), [(1, "unknown_parameter")]),
        (jsonl([{"custom_id": "a"}]), [(1, "missing_required_parameter")]),
        (jsonl([line("a", model="other"), line("b", model="other")]), [(1, "model_not_found"), (2, "model_not_found")]),
        (jsonl([line("a", "x" * 5000)]), [(1, "too_large")]),
    ],
)
async def test_what_is_wrong_with_an_input_is_said_line_by_line(
    redis: RedisClient, redis_url: str, content: bytes, errors: list[tuple[int | None, str]]
) -> None:
    async with asking(redis, redis_url, max_body_bytes=4096) as asked:
        batch = await asked.ended(await asked.create(content))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert [(each.line, each.code) for each in batch.errors.data or ()] == errors
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert not asked.requests


async def test_a_byte_order_mark_carriage_returns_and_a_last_line_without_an_end(asked: Asked) -> None:
    content = b"\xef\xbb\xbf" + jsonl([line("a")])[:-1] + b"\r\n\r\n" + jsonl([line("b")])[:-1]
    batch = await asked.ended(await asked.create(content))
    assert set(await asked.lines(batch.output_file_id)) == {"a", "b"}


async def test_a_cancelled_batch_has_what_was_answered_and_says_so_of_the_rest(asked: Asked) -> None:
    lines = [line("a"), line("b", "wait here"), *(line(str(number), "wait too") for number in range(100))]
    batch = await asked.create(jsonl(lines))

    async def is_answered() -> bool:
        counts = (await asked.batch(batch.id)).request_counts
        return counts is not None and counts.completed == 1 and len(asked.requests) >= 64

    await eventually(is_answered)
    cancelled = await asked.openai.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    ended = await asked.ended(batch)
    assert ended.status == "cancelled"
    assert ended.cancelling_at is not None
    assert ended.cancelled_at is not None
    good, bad = await asked.lines(ended.output_file_id), await asked.lines(ended.error_file_id)
    assert set(good) == {"a"}
    assert len(bad) == 101
    assert {each["error"]["code"] for each in bad.values()} == {"batch_cancelled"}
    again = await asked.openai.batches.cancel(batch.id)
    assert again.status == "cancelled"


async def test_a_batch_that_has_ended_is_not_cancelled(asked: Asked) -> None:
    batch = await asked.ended(await asked.create(jsonl([line("a")])))
    with pytest.raises(openai.ConflictError, match="completed, it can't be cancelled"):
        await asked.openai.batches.cancel(batch.id)


async def test_a_batch_expires_with_its_window(asked: Asked) -> None:
    batch = await asked.create(jsonl([line("a"), line("b", "wait here")]), window="2s")
    ended = await asked.ended(batch)
    assert ended.status == "expired"
    assert ended.expired_at is not None
    assert set(await asked.lines(ended.output_file_id)) == {"a"}
    bad = await asked.lines(ended.error_file_id)
    assert bad["b"]["error"]["code"] == "batch_expired"
    assert bad["b"]["response"] is None


async def test_batches_are_listed_in_pages_newest_first(asked: Asked) -> None:
    made = [(await asked.create(jsonl([line("a")]))).id for _ in range(3)]
    first = await asked.openai.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:0:-1]
    assert [batch.id async for batch in first] == made[::-1]


async def test_a_batch_sent_again_with_its_idempotency_key_is_the_same(asked: Asked) -> None:
    file = await asked.upload(jsonl([line("a")]))
    headers = {"Idempotency-Key": "k"}
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ids = {(await asked.http.post("/v1/batches", json=body, headers=headers)).json()["id"] for _ in range(3)}
    assert len(ids) == 1
    other = await asked.http.post("/v1/batches", json={**body, "completion_window": "1h"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    batch = await asked.batch(ids.pop())
    assert (await asked.ended(batch)).status == "completed"
    assert len(asked.requests) == 1


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "8d"}, 400, "completion_window"),
        ({"completion_window": 24}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"metadat": 1}, 400, "metadat"),
    ],
)
async def test_what_can_be_no_batch_is_refused(asked: Asked, change: dict[str, Any], status: int, param: str) -> None:
    file = await asked.upload(jsonl([line("a")]))
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **change}
    answer = await asked.http.post("/v1/batches", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_the_files_of_a_batch_expire_when_it_is_asked_for(asked: Asked) -> None:
    batch = await asked.create(jsonl([line("a")]), output_expires_after={"anchor": "created_at", "seconds": 3600})
    batch = await asked.ended(batch)
    assert batch.output_file_id is not None
    file = await asked.openai.files.retrieve(batch.output_file_id)
    assert file.expires_at == file.created_at + 3600
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    content = await asked.openai.files.content(batch.output_file_id)
    assert len(content.content) == file.bytes


async def test_answers_wait_for_the_capacity_to_keep_them(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are there soon after something is deleted."""
    monkeypatch.setattr(results, "FULL_WAIT_S", 0.05)
    async with asking(redis, redis_url, max_store_bytes=200_000) as asked:
        other = await asked.upload(b"x" * 190_000)
        batch = await asked.create(jsonl([line("a")]))
        await eventually(lambda: len(asked.requests) == 1)
        found = await asked.batch(batch.id)
        assert found.request_counts is not None
        assert (found.status, found.request_counts.completed) == ("in_progress", 0)
        await asked.openai.files.delete(other.id)
        batch = await asked.ended(batch)
        assert set(await asked.lines(batch.output_file_id)) == {"a"}


async def test_an_answer_that_can_t_be_kept_is_an_error_once_the_batch_ends(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_store_bytes=200_000) as asked:
        await asked.upload(b"x" * 190_000)
        batch = await asked.create(jsonl([line("a")]))
        await eventually(lambda: len(asked.requests) == 1)
        await asked.openai.batches.cancel(batch.id)
        batch = await asked.ended(batch)
        assert batch.status == "cancelled"
        bad = await asked.lines(batch.error_file_id)
        assert bad["a"]["error"]["code"] in ("store_full", "batch_cancelled")


async def test_another_gateway_goes_on_with_a_batch_whose_gateway_stops(redis: RedisClient, redis_url: str) -> None:
    """Work goes on at once, as the lease is handed back."""
    await announce(redis)
    async with ScriptedWorker(redis_url, answer) as worker:
        async with Asked.beside(worker, redis, redis_url) as first:
            batch = await first.create(jsonl([line("a", "wait here"), line("b")]))
            await eventually(lambda: len(first.requests) == 2)
        async with Asked.beside(worker, redis, redis_url) as second:
            await eventually(lambda: _is_held(redis))
            await second.openai.batches.cancel(batch.id)
            batch = await second.ended(batch)
            good, bad = await second.lines(batch.output_file_id), await second.lines(batch.error_file_id)
            assert (batch.status, set(good), set(bad)) == ("cancelled", {"b"}, {"a"})
            assert len(worker.taken) == 2


async def _is_held(redis: RedisClient) -> bool:
    return len(await redis.hkeys(names.batch_holders())) == 3


async def test_a_line_waits_while_nobody_serves_its_model(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        await asked.openai.models.list()
        await redis.delete(producer_keys.card("default"))
        batch = await asked.create(jsonl([line("a")]))
        await eventually(lambda: _is_unserved(asked))
        assert (await asked.batch(batch.id)).status in ("validating", "in_progress", "finalizing", "completed")
        await announce(redis)
        assert (await asked.ended(batch)).status == "completed"


async def _is_unserved(asked: Asked) -> bool:
    return not (await asked.openai.models.list()).data


async def test_batches_in_a_cluster(redis_cluster_url: str) -> None:
    redis = connect(redis_cluster_url, decode=True)
    try:
        async with asking(redis, redis_cluster_url) as asked:
            batch = await asked.ended(await asked.create(jsonl([line(str(number)) for number in range(20)])))
            assert batch.status == "completed"
            assert len(await asked.lines(batch.output_file_id)) == 20
            assert batch.output_file_id is not None
            await asked.openai.files.delete(batch.output_file_id)
            assert len((await asked.openai.files.list()).data) == 1
    finally:
        await redis.aclose()


async def test_a_line_that_breaks_the_gateway_fails_alone(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reply: Reply, *_: Any) -> Any:
        if reply.text == "b":
            raise KeyError(reply.text)
        return {"text": reply.text}

    monkeypatch.setattr(work, "chat_completion", broken)
    batch = await asked.ended(await asked.create(jsonl([line("a", "say a"), line("b", "say b")])))
    assert batch.status == "completed"
    assert set(await asked.lines(batch.output_file_id)) == {"a"}
    (bad,) = (await asked.lines(batch.error_file_id)).values()
    assert (bad["response"]["status_code"], bad["response"]["body"]["error"]["code"]) == (500, "internal_error")
