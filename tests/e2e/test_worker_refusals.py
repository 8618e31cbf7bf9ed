"""Malformed and refused requests: each gets one error end, and everything beside them goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from worker_harness import eventually, is_queue_empty, read_reply, running_worker, send

from penstock.producer import keys
from penstock.producer.connection import RedisClient, connect
from penstock.worker.chaos.fake_engine import FakeEngine, expected_text

MALFORMED: dict[str, dict[Any, Any]] = {
    "invalid json": {"request": "{"},
    "json of another type": {"request": "[1]"},
    "deep json": {"request": "[" * 3000},
    "unknown field": {"prompt": "x", "temprature": "1"},
    "unknown field that is no text": {"request": '{"prompt": "x", "\\ud800": 1}'},
    "bad utf-8": {"prompt": b"\xff\xfe"},
    "wrong type": {"prompt": "x", "max_tokens": "many"},
    "no prompt": {"max_tokens": "3"},
    "two prompts": {"prompt": "x", "prompt_token_ids": "[1]"},
    "no such version": {"prompt": "x", "v": "2"},
    "bad id": {"prompt": "x", "id": "a b{c}"},
    "too large": {"prompt": "x" * 5000},
}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "too many choices": ({"prompt": "x", "n": 9}, "invalid_request", "max_n is 8"),
    "too many stop strings": (
        {"prompt": "x", "stop": json.dumps(["a"] * 17)},
        "invalid_request",
        "max_stop_strings is 16",
    ),
    "too long a stop string": ({"prompt": "x", "stop": "a" * 257}, "invalid_request", "max_stop_chars is 256"),
    "too many prompt tokens": ({"prompt": "x" * 101}, "too_long", "max_prompt_tokens is 100"),
    "empty prompt": ({"prompt": ""}, "invalid_request", "the prompt is empty"),
    "chat the template refuses": (
        {"messages": '[{"role":"assistant","content":"x"}]'},
        "invalid_request",
        "must be the user's",
    ),
    "out of the engine's range": (
        {"prompt": "x", "stop_token_ids": str(list(range(40)))},
        "invalid_request",
        "at most 32",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_entry(redis_url: str, redis: RedisClient, name: str) -> None:
    async with running_worker(redis_url, max_body_bytes=4096):
        before = await send(redis, prompt="before", max_tokens=5)
        entry_id = await redis.xadd(keys.requests("q"), MALFORMED[name] | {})
        after = await send(redis, prompt="after", max_tokens=5)
        reply = await read_reply(redis, str(entry_id))
        assert (await read_reply(redis, before)).text() == expected_text("before", before, 5)
        assert (await read_reply(redis, after)).text() == expected_text("after", after, 5)
        await eventually(lambda: is_queue_empty(redis))
    assert reply.end.finish_reason == "error"
    assert reply.end.code == ("too_large" if name == "too large" else "invalid_request")
    assert reply.end.message
    binary = connect(redis_url, decode=False)
    letters = await binary.xrange(keys.dead("q"))
    await binary.aclose()
    assert [fields[b"entry"].decode() for _, fields in letters] == [entry_id]
    kept = {field.removeprefix(b"field:") for field in letters[0][1] if field.startswith(b"field:")}
    assert kept == (set() if name == "too large" else {field.encode() for field in MALFORMED[name]})


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_request_names_the_limit(redis_url: str, redis: RedisClient, name: str) -> None:
    fields, code, words = REFUSED[name]
    engine = FakeEngine()
    async with running_worker(redis_url, engine, max_prompt_tokens=100):
        await send(redis, **fields, id="refused")
        beside = await send(redis, prompt="beside", max_tokens=5)
        end = (await read_reply(redis, "refused")).end
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        await eventually(lambda: is_queue_empty(redis))
    assert (end.finish_reason, end.code) == ("error", code)
    assert end.message is not None
    assert words in end.message
    assert engine.prefilled == [beside]
    assert not await redis.exists(keys.dead("q"))


async def test_keys_of_another_type_are_a_dead_letter_and_no_more(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.reply("q", "taken"), "something else")
    async with running_worker(redis_url):
        await send(redis, prompt="x", id="taken")
        beside = await send(redis, prompt="beside", max_tokens=5)
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await redis.xrange(keys.dead("q"))
    assert letter["code"] == "reply_unwritable"
    assert letter["field:prompt"] == "x"


async def test_reply_that_turns_into_another_type_is_given_up(redis_url: str, redis: RedisClient) -> None:
    engine = FakeEngine()
    engine.hold()
    async with running_worker(redis_url, engine):
        await send(redis, prompt="x", id="taken", max_tokens=50)
        await eventually(lambda: engine.prefilled == ["taken"])
        await redis.set(keys.reply("q", "taken"), "something else")
        engine.allow()
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await redis.xrange(keys.dead("q"))
    assert letter["code"] == "reply_unwritable"
