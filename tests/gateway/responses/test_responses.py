"""Responses are created, kept, continued and deleted with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.gateway.responses.stored import KIND, PREFIX, TOKEN_BYTES
from penstock.gateway.store import names
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import MIN_KEEP_S
from tests.gateway.responses.responses_harness import Asked, asking, strictly
from tests.support.patience import eventually
from tests.support.programs.gateway_harness import CARD, announce

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Says how it is.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


def request_id(response_id: str) -> str:
    return response_id.removeprefix(PREFIX)


async def test_an_answer_and_what_it_took(asked: Asked) -> None:
    response = await asked.create("say two words", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert (response.status, response.output_text, response.store) == ("completed", "two words", True)  # type: ignore[attr-defined]
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0.5
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (9, 9)
    seconds, _ = await asked.redis.time()
    assert abs(response.created_at - seconds) < 60
    assert response.completed_at is not None
    (request,) = asked.requests
    assert request.messages is not None
    assert [(each.role, each.content) for each in request.messages] == [
        ("system", "Be brief."),
        ("user", "say two words"),
    ]
    assert (request.max_tokens, request.keep_s) == (CARD.max_model_len, 86_400)


async def test_a_stored_response_is_found_as_it_was_given(asked: Asked) -> None:
    response = await asked.create("think hello")
    assert strictly(await asked.openai.responses.retrieve(response.id)) == response
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 5


async def test_calls_of_functions(asked: Asked) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    response = await asked.create("call weather", tools=[WEATHER], tool_choice=choice)
    message, first, second = response.output
    assert message.type == "message"
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "weather", '{"city": "Oslo"}')
    assert (second.call_id, second.arguments, second.status) == ("call_2", "{}", "completed")
    (request,) = asked.requests
    (tool,) = request.tools
    assert tool["function"]["parameters"] == WEATHER["parameters"]
    assert request.chosen_tools() == ("weather",)


async def test_a_conversation_goes_on_from_a_response(asked: Asked) -> None:
    first = await asked.create("call weather", tools=[WEATHER], instructions="Only now.")
    said: Any = [{"type": "function_call_output", "call_id": "call_1", "output": "rain"}]
    second = strictly(
        await asked.openai.responses.create(
            model="tiny",
            input=[*said, {"role": "user", "content": "think hello"}],
            previous_response_id=first.id,
            tools=[WEATHER],
        )
    )
    third = await asked.create("say more", previous_response_id=second.id)
    assert (third.output_text, third.previous_response_id) == ("more", second.id)
    messages: Any = asked.requests[-1].model_dump(mode="json", exclude_unset=True)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "assistant", "user"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_1", "call_2"]
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    assert messages[4] == {"role": "assistant", "content": "hello", "reasoning": "hm, yes"}


async def test_an_answer_can_be_given_back_as_items(asked: Asked) -> None:
    """Clients that store nothing do that with what the gateway gave them, field by field."""
    first = await asked.create("think hello", store=False)
    call = await asked.create("call weather", tools=[WEATHER], store=False)
    given: list[Any] = [item.model_dump() for item in (*first.output, *call.output)]
    response = await asked.openai.responses.create(
        model="tiny", input=[*given, {"role": "user", "content": [{"type": "input_text", "text": "say yes"}]}]
    )
    assert response.output_text == "yes"
    messages: Any = asked.requests[-1].model_dump(mode="json", exclude_unset=True)["messages"]
    assert [message["role"] for message in messages] == ["assistant", "assistant", "user"]
    assert messages[0] == {"role": "assistant", "content": "hello", "reasoning": "hm, yes"}
    assert messages[1]["content"] == "calling"
    assert len(messages[1]["tool_calls"]) == 2


async def test_a_call_that_was_cut_off_is_part_of_the_next_turn(asked: Asked) -> None:
    first = await asked.create("cut_call weather", tools=[WEATHER])
    assert first.status == "incomplete"
    assert first.output[0].type == "function_call"
    assert first.output[0].status == "incomplete"
    assert (await asked.create("say so", previous_response_id=first.id)).output_text == "so"
    stored = asked.requests[-1].messages
    given: list[Any] = [{"role": "user", "content": "cut_call weather"}, first.output[0].model_dump()]
    await asked.openai.responses.create(model="tiny", input=[*given, {"role": "user", "content": "say so"}])
    sent = asked.requests[-1].messages
    assert stored is not None
    assert sent is not None
    assert stored[1].tool_calls is not None
    assert stored[1].tool_calls == sent[1].tool_calls
    assert stored[1].tool_calls[0].function.arguments == '{"ci'


async def test_history_is_not_judged(asked: Asked) -> None:
    given: list[Any] = [
        {"role": "assistant", "content": None},
        {"type": "function_call", "call_id": "", "name": "no name of ours", "arguments": "[1]"},
        {"type": "function_call", "call_id": "c" * 300, "name": "weather"},
        {"type": "function_call_output", "call_id": "nobody's"},
        {"type": "function_call_output", "call_id": "", "output": []},
        {"role": "user", "content": "say so"},
    ]
    response = await asked.http.post("/v1/responses", json={"model": "tiny", "input": given})
    assert response.status_code == 200, response.text
    messages: Any = asked.requests[-1].model_dump(mode="json", exclude_none=True)["messages"]
    assert [call["function"]["arguments"] for call in messages[0]["tool_calls"]] == ["[1]", "{}"]
    assert [message["content"] for message in messages] == ["", [], [], "say so"]


@pytest.mark.parametrize(
    ("text", "status", "details"),
    [("cut a", "incomplete", "max_output_tokens"), ("say a", "completed", None)],
)
async def test_how_it_ended(asked: Asked, text: str, status: str, details: str | None) -> None:
    response = await asked.create(text)
    assert response.status == status
    assert (response.incomplete_details.reason if response.incomplete_details else None) == details


async def test_what_nobody_wants_stored_leaves_nothing(asked: Asked) -> None:
    response = await asked.create("say it", store=False)
    assert response.store is False  # type: ignore[attr-defined]
    assert not await asked.redis.keys("penstock:gateway:*response*")
    assert asked.requests[0].keep_s is None
    with pytest.raises(openai.NotFoundError, match=f"'{response.id}' is not there"):
        await asked.openai.responses.retrieve(response.id)


async def test_what_is_refused_leaves_nothing(asked: Asked) -> None:
    with pytest.raises(openai.BadRequestError, match="far too long") as caught:
        await asked.create("refuse far too long")
    assert caught.value.code == "context_length_exceeded"
    assert not await asked.redis.keys("penstock:gateway:*response*")
    assert await asked.redis.hget(names.ledger_sizes(), "total") == "0"


async def test_what_expires_in_the_queue_is_a_timeout(asked: Asked) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await asked.create("expire now", extra_body={"timeout_s": 5})
    assert caught.value.status_code == 408
    assert asked.requests[0].timeout_s == 5


async def test_what_is_kept_lives_as_long_as_was_set(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, keep_responses_s=1000) as asked:
        first = await asked.create("say it")
        await announce(redis, card=CARD.model_copy(update={"max_keep_s": 100}))
        async with asking(redis, redis_url, keep_responses_s=1000) as other:
            await announce(redis, card=CARD.model_copy(update={"max_keep_s": 100}))
            second = await other.create("say it")
        assert {request.keep_s for request in (*asked.requests, *other.requests)} == {1000, 100}
    for response, keep_s in ((first, 1000), (second, 100)):
        ttl_s = await redis.ttl(names.record(KIND, request_id(response.id)))
        assert 86_400 < ttl_s <= 86_400 + keep_s


async def test_a_full_store_refuses_only_what_was_to_be_stored(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_store_bytes=1000) as asked:
        response = await asked.create("say it")
        assert (response.output_text, response.store) == ("it", False)  # type: ignore[attr-defined]
        with pytest.raises(openai.InternalServerError, match="may keep 1000") as caught:
            await asked.create("say it", store=True)
        assert (caught.value.status_code, caught.value.code) == (507, "store_full")


async def test_the_size_of_an_answer_is_counted_once_it_is_known(asked: Asked) -> None:
    await asked.create("say it", max_output_tokens=4000)
    small = int(await asked.redis.hget(names.ledger_sizes(), "total") or 0)
    assert small < 4000
    await asked.create(f"say {'x' * 10_000}", max_output_tokens=16)
    assert int(await asked.redis.hget(names.ledger_sizes(), "total") or 0) > small + 10_000


async def test_what_a_background_response_may_take_is_counted_before_anybody_reads_it(
    redis: RedisClient, redis_url: str
) -> None:
    async with asking(redis, redis_url, max_store_bytes=10_000 * TOKEN_BYTES) as asked:
        first = await asked.create("wait here", background=True, max_output_tokens=9_000)
        with pytest.raises(openai.InternalServerError, match="do not fit"):
            await asked.create("wait here", background=True, max_output_tokens=9_000)
        await asked.openai.responses.cancel(first.id)
        second = await asked.create("wait here", background=True, max_output_tokens=9_000)
        await asked.openai.responses.cancel(second.id)


async def test_what_is_deleted_is_gone(asked: Asked) -> None:
    response = await asked.create("say it")
    await asked.openai.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await asked.openai.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await asked.openai.responses.delete(response.id)
    assert 0 < await asked.redis.ttl(keys.reply("default", request_id(response.id))) <= MIN_KEEP_S
    assert await asked.redis.hget(names.ledger_sizes(), "total") == "0"


async def test_what_it_was_asked_with(asked: Asked) -> None:
    given: Any = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
        {"type": "reasoning", "id": "rs_mine", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": "say it"},
    ]
    response = await asked.openai.responses.create(model="tiny", input=given)
    listed = await asked.openai.responses.input_items.list(response.id, order="asc")
    assert [item.type for item in listed.data] == [
        "message", "message", "reasoning", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert listed.data[2].id == "rs_mine"
    assert len({item.id for item in listed.data}) == 6
    newest = await asked.openai.responses.input_items.list(response.id, limit=4)
    assert [item.id for item in newest.data] == [item.id for item in reversed(listed.data)][:4]
    assert newest.has_more
    rest = await asked.openai.responses.input_items.list(response.id, limit=4, after=str(newest.data[-1].id))
    assert [item.id for item in rest.data] == [listed.data[1].id, listed.data[0].id]
    assert not rest.has_more


async def test_what_has_no_end_is_nothing_to_go_on_from(asked: Asked) -> None:
    running = await asked.create("wait here", background=True)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await asked.create("say it", previous_response_id=running.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await asked.create("say it", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"
    broken = await asked.create("break it", background=True)
    await eventually(lambda: _has_failed(asked, broken.id))
    with pytest.raises(openai.BadRequestError, match="failed, engine_error"):
        await asked.create("say it", previous_response_id=broken.id)


async def _has_failed(asked: Asked, response_id: str) -> bool:
    return (await asked.openai.responses.retrieve(response_id)).status == "failed"


async def test_a_reply_that_expired_before_its_record_is_not_there(asked: Asked) -> None:
    response = await asked.create("say it")
    await asked.redis.delete(keys.reply("default", request_id(response.id)))
    for look in (asked.openai.responses.retrieve, asked.openai.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="has expired"):
            await look(response.id)
    with pytest.raises(openai.NotFoundError):
        await asked.create("say it", previous_response_id=response.id)
    await asked.openai.responses.delete(response.id)


async def test_logprobs_of_the_text(asked: Asked) -> None:
    response = await asked.create("say it", include=["message.output_text.logprobs"], top_logprobs=2)
    assert asked.requests[0].logprobs == 2
    assert response.top_logprobs == 2
    await asked.create("say it", top_logprobs=0)
    assert asked.requests[1].logprobs is None


async def test_a_form_of_the_text(asked: Asked) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    response = await asked.create("say it", text=form)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert response.text.format.schema_ == schema
    asked_for = asked.requests[0].response_format
    assert asked_for is not None
    assert asked_for.json_schema is not None
    assert asked_for.json_schema.schema_ == schema


async def test_an_idempotency_key_names_one_response(asked: Asked) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = [await asked.create("say it", extra_headers=headers) for _ in range(2)]
    assert first == second
    assert len(asked.requests) == 1
    background = [await asked.create("say it", background=True, extra_headers={"Idempotency-Key": "b"}) for _ in "12"]
    assert background[0].id == background[1].id
    assert len(asked.requests) == 2
    for other in ({"said": "say something else"}, {"said": "say it", "metadata": {"a": "b"}}):
        with pytest.raises(openai.UnprocessableEntityError):
            await asked.create(**other, extra_headers=headers)


@pytest.mark.parametrize("path", ["", "/input_items", "/cancel"])
async def test_an_id_that_is_none_is_not_found(asked: Asked, path: str) -> None:
    for response_id in ("resp_", "resp_{x}", "x" * 300, "resp_" + "x" * 200):
        ask = asked.http.post if path == "/cancel" else asked.http.get
        answer = await ask(f"/v1/responses/{response_id}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
