"""Errors under /v1/messages, in Anthropic's form and as the classes of its official client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse

from penstock.gateway.anthropic.request import IGNORED, REFUSED, MessageBody
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.anthropic.anthropic_clients import HELLO, MESSAGES, TINY, Asked, asking
from tests.gateway.openai.test_openai_errors import ending, refusing
from tests.support.programs.fakes import ScriptedReply
from tests.support.programs.gateway_harness import CARD, announce, new_key

INVALID = "invalid_request_error"
BAD = anthropic.BadRequestError


async def raised(asked: Asked, kind: type[anthropic.APIStatusError], **fields: Any) -> tuple[int, str]:
    """Returns the status and the type of the error."""
    with pytest.raises(anthropic.APIStatusError) as caught:
        await asked.client.post(MESSAGES, body={**TINY, **fields}, cast_to=object)
    error = caught.value
    assert type(error) is kind
    assert error.response.headers["x-should-retry"] == ("true" if "retry-after" in error.response.headers else "false")
    body: Any = error.body
    assert body["request_id"] == error.request_id == error.response.headers["x-request-id"]
    if body["error"]["type"] != "request_too_large":  # the types do not have it
        ErrorResponse.model_validate_json(error.response.text, strict=True)
    return error.status_code, body["error"]["type"]


ASKED: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], int, str]] = {
    "unknown model": ({"model": "huge"}, anthropic.NotFoundError, 404, "not_found_error"),
    "ambiguous model": ({"model": "twin"}, BAD, 400, INVALID),
    "unserved model": ({"model": "absent"}, anthropic.ServiceUnavailableError, 503, "overloaded_error"),
    "unknown field": ({"tempreature": 1}, BAD, 400, INVALID),
    "wrong type": ({"temperature": "hot"}, BAD, 400, INVALID),
    "out of range": ({"top_p": 2}, BAD, 400, INVALID),
    "missing field": ({"max_tokens": None}, BAD, 400, INVALID),
}

ANSWERED: dict[str, tuple[Any, type[anthropic.APIStatusError], int, str]] = {
    "too long": (refusing("too_long", "the prompt has 9 tokens"), BAD, 400, INVALID),
    "expired": (ending("expired"), anthropic.RequestTimeoutError, 408, "timeout_error"),
    "cancelled": (ending("cancelled"), anthropic.ConflictError, 409, INVALID),
    "engine broke": (refusing("engine_error", "out of luck"), anthropic.InternalServerError, 500, "api_error"),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_what_is_wrong_with_a_request_has_a_class_of_its_own(
    redis: RedisClient, redis_url: str, streamed: bool
) -> None:
    for queue in ("first", "second"):
        await announce(redis, queue, CARD.model_copy(update={"model": "twin"}))
    async with asking(redis, redis_url, queues=("default", "absent", "first", "second")) as asked:
        for case, (fields, kind, *expected) in ASKED.items():
            assert [*await raised(asked, kind, stream=streamed, **fields)] == expected, case
        assert asked.worker.taken == []


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("behave", "kind", "status", "type_"), ANSWERED.values(), ids=ANSWERED)
async def test_what_ends_an_answer_before_it_begins_has_a_status(
    redis: RedisClient, redis_url: str, behave: Any, kind: Any, status: int, type_: str, streamed: bool
) -> None:
    async with asking(redis, redis_url, behave) as asked:
        assert await raised(asked, kind, stream=streamed) == (status, type_)


async def test_a_body_that_is_too_large(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_body_bytes=2000) as asked:
        found = await raised(asked, anthropic.RequestTooLargeError, system="x" * 3000)
        assert found == (413, "request_too_large")


async def test_a_full_queue_says_when_to_come_again(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_queue_length=1) as asked:
        await redis.xadd(keys.requests("other"), {"prompt": "waits"})
        await announce(redis, "other")
        assert await raised(asked, anthropic.RateLimitError, model="other") == (429, "rate_limit_error")


async def test_routing_answers_in_the_same_form(redis: RedisClient, redis_url: str) -> None:
    """Elsewhere, routing errors have OpenAI's form."""
    async with asking(redis, redis_url) as asked:
        for method, path, status, kind in (
            ("GET", MESSAGES, 405, INVALID),
            ("POST", f"{MESSAGES}/batches", 404, "not_found_error"),
        ):
            response = await asked.http.request(method, path)
            body = ErrorResponse.model_validate_json(response.text, strict=True)
            assert (response.status_code, body.error.type) == (status, kind)
        for path in ("/v1/chat/completions", "/v1/messagesque"):
            assert set((await asked.http.post(path)).json()["error"]) == {"message", "type", "param", "code"}


async def test_the_guard_answers_in_the_same_form(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, models=["default"], limits={"requests_per_minute": 1})
    other = await new_key(redis_url, models=["other"])
    async with asking(redis, redis_url) as asked:
        assert await raised(asked, anthropic.AuthenticationError) == (401, "authentication_error")
        with_key = replace(asked, client=asked.client.copy(api_key=secret.text))
        await with_key.client.messages.create(**TINY)
        assert await raised(with_key, anthropic.RateLimitError) == (429, "rate_limit_error")
        with_other = replace(asked, client=asked.client.copy(api_key=other.text))
        assert await raised(with_other, anthropic.NotFoundError) == (404, "not_found_error")


async def test_what_nobody_expected_has_the_form_too(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_: object) -> None:
        raise KeyError("prompt")

    monkeypatch.setattr("penstock.gateway.anthropic.messages.read_message", stumble)
    async with asking(redis, redis_url) as asked:
        assert await raised(asked, anthropic.InternalServerError) == (500, "api_error")


@pytest.mark.parametrize(
    ("reason", "code", "expected"), [("error", "engine_error", "api_error"), ("expired", None, "timeout_error")]
)
async def test_what_ends_an_answer_midway_raises_in_the_client(
    redis: RedisClient, redis_url: str, reason: str, code: str | None, expected: str
) -> None:
    async def stumble(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("half an ")
        await reply.end(reason, code=code, message="out of luck")

    async with asking(redis, redis_url, stumble) as asked:
        async with asked.client.messages.stream(**TINY) as stream:
            assert await anext(stream.text_stream) == "half an "
            with pytest.raises(anthropic.APIStatusError) as caught:
                await anext(stream.text_stream)
        body = ErrorResponse.model_validate(caught.value.body)
        assert body.error.type == expected
        assert body.request_id == caught.value.response.headers["request-id"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


UNSUPPORTED: list[tuple[Any, str]] = [
    (of_user(IMAGE), "messages[0].content[0].type: blocks of type 'image' are not supported here, only text"),
    (of_user({"type": "document"}), "messages[0].content[0]: source: Field required"),
    (of_user({"type": "document", "source": {"type": "base64"}}), "source.type: Input should be 'text' or 'content'"),
    (of_user(CALL), "'tool_use'"),
    (
        of_user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
        "content[0].content[0].type: blocks",
    ),
    (of_user({"type": "tool_result", "content": "a"}), "messages[0].content[0]: tool_use_id"),
    (of_user({"type": "text", "text": 1}), "messages[0].content[0]: text"),
    (of_user({"type": "text", "text": "a", "citations": {"enabled": True}}), "sources are not cited"),
    (of_user("a"), "messages[0].content[0]: must be an object"),
    (of_user({}), "blocks of type null"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: must be a text or a list"),
    ({"messages": [{"role": "user"}]}, "messages[0]: content"),
    ({"messages": []}, "messages: is empty"),
    ({"messages": None, "system": "sparrow"}, "messages: Field required"),
    ({"messages": {"role": "user", "content": "sparrow"}}, "messages: Input should be a valid list, not an object"),
    ({"messages": HELLO * 5000}, "has 5000 messages"),
    ({"messages": [{"role": "user", "content": [{}] * 9000}]}, "has 9000 blocks"),
    ({"system": [IMAGE]}, "system[0].type: blocks of type 'image'"),
    ({"system": [{}] * 9000}, "has 9000 blocks"),
    ({"system": 1}, "system: must be a text or a list"),
    (
        {"tools": [{"type": "custm", "name": "f"}]},
        "tools[0]: a tool of type 'custm' is not there, did you mean custom?",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0]: input_schema"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [1]}]}, "input_examples"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 600}, "has 600 tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: required, but there are no tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"container": "c"}, "container: no code is run"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2}, "n: an answer is one message"),
]


async def test_what_is_not_supported_is_refused_by_name(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        for fields, says in UNSUPPORTED:
            message = (await asked.refusal(**fields))["message"]
            assert says in message
            assert "sparrow" not in message
        assert asked.worker.taken == []


async def test_no_value_breaks_the_gateway(redis: RedisClient, redis_url: str) -> None:
    values: list[Any] = [
        0,
        -1,
        2**70,
        1.5,
        True,
        "a",
        "",
        [],
        [[]],
        [1],
        {},
        {"type": "a"},
        [{"type": ["a"]}],
        {"": {}},
    ]
    block = [{"type": kind, **dict.fromkeys(("text", "input", "id", "content"), 1)} for kind in ("text", "tool_use")]
    async with asking(redis, redis_url) as asked:
        for name in {*MessageBody.model_fields, *IGNORED, *REFUSED} - {"model", "stream"}:
            for value in [*values, block]:
                response = await asked.http.post(MESSAGES, json=TINY | {name: value})
                assert response.status_code in (200, 400), (name, value, response.text)
        for value in [*values, *(of_user(each)["messages"] for each in [*values, *block])]:
            for fields in ({"messages": value}, {"messages": [{"role": "assistant", "content": value}]}):
                response = await asked.http.post(MESSAGES, json=TINY | fields)
                assert response.status_code in (200, 400), (fields, response.text)
