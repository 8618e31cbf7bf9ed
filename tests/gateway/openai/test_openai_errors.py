"""Errors as the official client sees them: a class of its own, with status, type, code and field."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import openai
import pytest
from structlog.testing import capture_logs

from penstock.gateway.errors import MAX_CODE_CHARS, MAX_MESSAGE_CHARS, api_error
from penstock.producer import CallFailed, RequestRefused
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.publish.ending import MAX_MESSAGE_CHARS as MAX_OF_WORKERS
from tests.gateway.openai.openai_clients import HELLO, Asked, asking, data_of
from tests.support.programs.fakes import LossyProxy, ScriptedReply
from tests.support.programs.gateway_client import bare_client, openai_client
from tests.support.programs.gateway_harness import CARD, announce, running_gateway

CHAT = "/v1/chat/completions"
TINY: Any = {"model": "tiny", "messages": HELLO}


class Told(NamedTuple):
    """The error that the client gets."""

    kind: type[openai.APIStatusError]
    status: int
    type: str
    code: str
    param: str | None = None
    retry_after: str | None = None


def refusing(code: str, message: str) -> Callable[[ScriptedReply], Awaitable[None]]:
    async def refuse(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end("error", code=code, message=message)

    return refuse


def ending(reason: str) -> Callable[[ScriptedReply], Awaitable[None]]:
    async def end(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.end(reason)

    return end


INVALID = "invalid_request_error"
BAD = openai.BadRequestError

ASKED: dict[str, tuple[dict[str, Any], Told]] = {
    "unknown model": ({"model": "huge"}, Told(openai.NotFoundError, 404, INVALID, "model_not_found", "model")),
    "ambiguous model": ({"model": "twin"}, Told(BAD, 400, INVALID, "ambiguous_model", "model")),
    "unserved model": (
        {"model": "absent"},
        Told(openai.InternalServerError, 503, "server_error", "no_worker", "model", "1"),
    ),
    "unknown field": ({"tempreature": 1}, Told(BAD, 400, INVALID, "unknown_parameter", "tempreature")),
    "field of another server": (
        {"kv_transfer_params": {"a": 1}},
        Told(BAD, 400, INVALID, "unsupported_parameter", "kv_transfer_params"),
    ),
    "wrong type": ({"temperature": "hot"}, Told(BAD, 400, INVALID, "invalid_type", "temperature")),
    "out of range": ({"top_p": 2}, Told(BAD, 400, INVALID, "invalid_value", "top_p")),
    "missing field": ({"messages": None}, Told(BAD, 400, INVALID, "missing_required_parameter", "messages")),
    "too large": ({"user": "x" * 3000}, Told(openai.APIStatusError, 413, INVALID, "too_large")),
}

ANSWERED: dict[str, tuple[Any, Told]] = {
    "too long": (
        refusing("too_long", "the prompt has 9 tokens"),
        Told(BAD, 400, INVALID, "context_length_exceeded"),
    ),
    "over a worker's limit": (
        refusing("invalid_request", "n: is 9, the limit max_n is 8"),
        Told(BAD, 400, INVALID, "invalid_request", "n"),
    ),
    "an entry too large": (
        refusing("too_large", "the entry has 9 bytes"),
        Told(openai.APIStatusError, 413, INVALID, "too_large"),
    ),
    "expired": (ending("expired"), Told(openai.APIStatusError, 408, "timeout_error", "expired")),
    "cancelled": (ending("cancelled"), Told(openai.ConflictError, 409, "conflict_error", "cancelled")),
    "engine broke": (
        refusing("engine_error", "out of luck"),
        Told(openai.InternalServerError, 500, "server_error", "internal_error"),
    ),
}


async def told(asked: Asked, streamed: bool, **fields: Any) -> Told:
    body = {**TINY, "stream": streamed, **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        await asked.openai.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert error.response.headers["x-should-retry"] == ("true" if "retry-after" in error.response.headers else "false")
    body_of: Any = error.body
    retry_after = error.response.headers.get("retry-after")
    return Told(type(error), error.status_code, body_of["type"], error.code or "", error.param, retry_after)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_what_is_wrong_with_a_request_has_a_class_of_its_own(
    redis: RedisClient, redis_url: str, streamed: bool
) -> None:
    settings: Any = {"max_body_bytes": 2000, "queues": ("default", "absent", "first", "second")}
    for queue in ("first", "second"):
        await announce(redis, queue, CARD.model_copy(update={"model": "twin"}))
    async with asking(redis, redis_url, **settings) as asked:
        for case, (fields, expected) in ASKED.items():
            assert await told(asked, streamed, **fields) == expected, case
        assert asked.worker.taken == []


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("behave", "expected"), ANSWERED.values(), ids=ANSWERED)
async def test_what_ends_an_answer_before_it_begins_has_a_status(
    redis: RedisClient, redis_url: str, behave: Any, expected: Told, streamed: bool
) -> None:
    async with asking(redis, redis_url, behave) as asked:
        assert await told(asked, streamed) == expected


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_full_queue_says_when_to_come_again(redis: RedisClient, redis_url: str, streamed: bool) -> None:
    async with asking(redis, redis_url, max_queue_length=1) as asked:
        await redis.xadd(keys.requests("other"), {"prompt": "waits"})
        await announce(redis, "other")
        expected = Told(openai.RateLimitError, 429, "rate_limit_error", "queue_full", None, "1")
        assert await told(asked, streamed, model="other") == expected


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_would_expire_in_the_queue_is_told_when_to_come_again(
    redis: RedisClient, redis_url: str, streamed: bool
) -> None:
    async with asking(redis, redis_url) as asked:
        await redis.xadd(keys.requests("other"), {"prompt": "waits"})
        await announce(redis, "other")
        now_ms = int((await redis.time())[0]) * 1000
        load = {"at_ms": now_ms, "rate": 100, "bands": "0:10:4500:9000"}
        await redis.hset(keys.load("other"), mapping=load)  # type: ignore[arg-type]
        await redis.zadd(keys.band("other", 0), {"crowd": 0})
        before = set(await redis.keys("*{other}*"))
        expected = Told(openai.RateLimitError, 429, "rate_limit_error", "queue_full", None, "3")
        assert await told(asked, streamed, model="other", timeout_s=2) == expected  # behind 450 tokens of the crowd
        assert set(await redis.keys("*{other}*")) == before
        assert await redis.xlen(keys.requests("other")) == 1


async def test_without_redis_a_gateway_is_unavailable(redis: RedisClient, redis_url: str) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    await announce(redis)
    async with AsyncExitStack() as stack:
        lossy = await stack.enter_async_context(LossyProxy(port))
        gateway = await stack.enter_async_context(running_gateway(lossy.url))
        client = await stack.enter_async_context(openai_client(gateway.url))
        assert (await client.models.list()).data
        await lossy.refuse()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**TINY)
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert caught.value.response.headers["retry-after"] == "1"
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"] == "the gateway has no connection to its queue now; try again"


async def test_what_is_no_redis_is_unavailable_and_named_in_the_log_alone() -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    with capture_logs() as log:
        async with await asyncio.start_server(speak_http, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with running_gateway(f"redis://{address}") as gateway, bare_client(gateway) as client:
                answer = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert not any(word in answer.text for word in (address, "redis", "Redis", "rotocol"))
    assert any(address in line["redis"] for line in log if line["event"] == "redis_unavailable")


@pytest.mark.every_server
async def test_a_redis_that_is_full_is_unavailable_until_it_is_not(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        await redis.config_set("maxmemory", 1)
        try:
            answer = await client.post(CHAT, json=TINY)
        finally:
            await redis.config_set("maxmemory", 0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert "maxmemory" not in answer.text


async def test_a_key_that_holds_something_else_is_named_in_the_log_alone(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    await redis.delete(keys.card("default"))
    await redis.set(keys.card("default"), "of another type")
    with capture_logs() as log:
        async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
            answer = await client.post(CHAT, json=TINY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert not any(word in answer.text for word in ("127.0.0.1", "redis", "Redis", "WRONGTYPE"))
    assert [line["key"] for line in log if line["event"] == "junk_passed_over"] == [keys.card("default")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"), (b"[]", "is a list, not an object"), (b'"a"', "is a string"), (b"null", "is null"),
        (b"[" * 100_000, "recursion limit"), (b'{"a":' * 80 + b"1" + b"}" * 80, "nested more than 64 deep"),
    ],
)  # fmt: skip
async def test_a_body_that_is_none_is_refused(redis: RedisClient, redis_url: str, content: bytes, says: str) -> None:
    async with asking(redis, redis_url) as asked:
        response = await asked.http.post(CHAT, content=content)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_json")
        assert says in error["message"]


@pytest.mark.parametrize(("path", "status"), [("/v1/chat", 404), ("/v1/embeddings", 404), (CHAT, 405)])
async def test_what_is_not_there_is_said_in_the_same_form(
    redis: RedisClient, redis_url: str, path: str, status: int
) -> None:
    async with asking(redis, redis_url) as asked:
        response = await asked.http.get(path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/embeddings", "embeddings are not served"),
        ("/api/chat", "Ollama's own API is not spoken here"),
        ("/v1beta/models/x:generateContent", "Gemini's API is not spoken here"),
        ("/v1/responses/input_tokens", "POST /v1/count_tokens"),
        ("/v1/responses/compact", "no conversation is compacted"),
    ],
)
async def test_what_other_servers_have_is_not_found(redis: RedisClient, redis_url: str, path: str, says: str) -> None:
    async with asking(redis, redis_url) as asked:
        response = await asked.http.post(path, json={"model": "tiny", "input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert says in response.json()["error"]["message"]


async def streamed_chat(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(stream=True, **TINY)


async def streamed_completion(client: openai.AsyncOpenAI) -> Any:
    return await client.completions.create(model="tiny", prompt="a", stream=True)


@pytest.mark.parametrize(
    ("reason", "code", "expected"), [("error", "engine_error", "internal_error"), ("expired", None, "expired")]
)
@pytest.mark.parametrize("ask", [streamed_chat, streamed_completion])
async def test_what_ends_an_answer_midway_raises_in_the_client(
    redis: RedisClient, redis_url: str, ask: Any, reason: str, code: str | None, expected: str
) -> None:
    async def stumble(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("half an ")
        await reply.end(reason, code=code, message="out of luck")

    async with asking(redis, redis_url, stumble) as asked:
        stream = await ask(asked.openai)
        first = await anext(stream)
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert "half an " in first.model_dump_json()
        assert caught.value.code == expected
        response = await asked.post(CHAT, {**TINY, "stream": True})
        assert "[DONE]" not in data_of(response.text)


@pytest.mark.parametrize("code", ["invalid_request", "too_long", "too_large", "x" * 10_000])
def test_what_a_worker_says_is_passed_on_up_to_a_length(code: str) -> None:
    for said in (RequestRefused("r", code, "y" * 1_000_000), CallFailed("count_tokens", code, "y" * 1_000_000)):
        error = api_error(said)
        assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARS > MAX_OF_WORKERS
        assert error.message.endswith("…")
        assert len(error.code or "") <= MAX_CODE_CHARS
