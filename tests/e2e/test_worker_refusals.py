"""A malformed or refused request gets one error end, and everything beside it goes on."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import httpx2
import pytest

from penstock.producer import AsyncClient, RequestRefused
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.wire import MAX_FIELDS
from penstock.tools.chaos.fake_engine import FakeEngine, expected_text
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import (
    end_as,
    is_queue_empty,
    read_reply,
    running_worker,
    send,
    take_and_claim,
)
from tests.support.redis_servers.streams import read_raw_stream, read_stream

MALFORMED: dict[str, dict[Any, Any]] = {
    "invalid json": {"request": "{"},
    "json of another type": {"request": "[1]"},
    "deep json": {"request": "[" * 3000},
    "unknown field": {"prompt": "x", "temprature": "1"},
    "unknown field that is not text": {"request": '{"prompt": "x", "\\ud800": 1}'},
    "bad utf-8": {"prompt": b"\xff\xfe"},
    "wrong type": {"prompt": "x", "max_tokens": "many"},
    "no prompt": {"max_tokens": "3"},
    "two prompts": {"prompt": "x", "prompt_token_ids": "[1]"},
    "no such version": {"prompt": "x", "v": "2"},
    "kept too short": {"prompt": "x", "keep_s": "59"},
    "bad tenant": {"prompt": "x", "tenant": "a b{c}"},
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
    "kept too long": (
        {"prompt": "x", "keep_s": 604_801},
        "invalid_request",
        "keep_s is 604801, the limit max_keep_s is 604800",
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
    letters = await read_raw_stream(binary, keys.malformed("q"))
    assert not await binary.exists(keys.dead("q"))
    await binary.aclose()
    assert [fields[b"entry"].decode() for _, fields in letters] == [entry_id]
    kept = {field.removeprefix(b"field:") for field in letters[0][1] if field.startswith(b"field:")}
    assert kept == (set() if name == "too large" else {field.encode() for field in MALFORMED[name]})


async def test_a_request_over_the_worker_s_limit_is_refused_to_whoever_sent_it(redis_url: str) -> None:
    """Whichever way it came, nobody waits for a reply under another id."""
    large = "x" * 5000
    chat = {"model": "q", "messages": [{"role": "user", "content": large}]}
    async with (
        running_worker(redis_url, max_body_bytes=4096),
        AsyncClient(redis_url, queue="q") as client,
        running_gateway(redis_url) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        with pytest.raises(RequestRefused, match="max_body_bytes is 4096") as caught:
            await client.generate(large)
        assert caught.value.code == "too_large"
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json={**chat, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        response = (await http.post("/v1/responses", json={"model": "q", "input": large, "background": True})).json()

        async def has_failed() -> bool:
            shown = (await http.get(f"/v1/responses/{response['id']}")).json()
            assert shown["status"] in ("queued", "failed")
            return bool(shown["status"] == "failed")

        await eventually(has_failed)


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
    assert not await redis.exists(keys.dead("q"), keys.malformed("q"))


WIDE: dict[str, dict[Any, Any]] = {
    "4,000 fields": {f"f{i}": "v" for i in range(4_000)},
    "100,000 fields": {f"{i}": "" for i in range(100_000)},
    "as many fields as are looked at": {f"f{i}": "v" for i in range(MAX_FIELDS)},
    "one field more": {f"f{i}": "v" for i in range(MAX_FIELDS + 1)},
    "binary names": {bytes([i]) * 3: b"\xff" for i in range(128, 255)},
    "an empty name": {"": ""},
    "one huge field": {"prompt": "x" * 3_000_000},
    "a wide document": {"request": json.dumps({f"f{i}": i for i in range(50_000)})},
}


@pytest.mark.parametrize("name", WIDE)
async def test_whatever_an_entry_holds_it_leaves(redis_url: str, redis: RedisClient, name: str) -> None:
    async with running_worker(redis_url) as worker:
        entry_id = await redis.execute_command(
            "XADD", keys.requests("q"), "*", *(part for pair in WIDE[name].items() for part in pair)
        )
        end = (await read_reply(redis, entry_id)).end
        await worker.drain()
    assert end.code == ("too_large" if name == "one huge field" else "invalid_request")
    if len(WIDE[name]) > MAX_FIELDS or name == "a wide document":
        assert f"fields, the limit is {MAX_FIELDS}" in (end.message or "")  # nothing looks at each of them
    assert await is_queue_empty(redis)
    async with running_worker(redis_url):
        beside = await send(redis, prompt="beside", max_tokens=5)
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        await eventually(lambda: is_queue_empty(redis))
    async with aclosing(connect(redis_url, decode=False)) as binary:
        ((_, letter),) = await read_raw_stream(binary, keys.malformed("q"))
        assert not await binary.exists(keys.dead("q"))
    kept = {field.removeprefix(b"field:"): value for field, value in letter.items() if field.startswith(b"field:")}
    fits = len(WIDE[name]) <= MAX_FIELDS and end.code == "invalid_request"
    assert kept == ({_bytes(field): _bytes(value) for field, value in WIDE[name].items()} if fits else {})


async def test_an_entry_left_by_a_worker_that_could_not_bury_it_leaves(redis_url: str, redis: RedisClient) -> None:
    """The worker died after it had written the end; the next worker finds the entry so."""
    fields = [part for i in range(4_000) for part in (f"f{i}", "v")]
    entry_id = await redis.execute_command("XADD", keys.requests("q"), "*", *fields)
    claim = await take_and_claim(redis, "dead", entry_id)
    await end_as(redis, entry_id, claim, "dead", finish_reason="error", code="invalid_request")
    async with running_worker(redis_url):
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await read_stream(redis, keys.malformed("q"))
    assert (letter["id"], letter["code"]) == (entry_id, "given_up")
    assert not await redis.exists(keys.dead("q"))


SPOILT_LETTERS: dict[str, tuple[str | int, ...]] = {
    "a string": ("SET", keys.malformed("q"), "something else"),
    "a list": ("RPUSH", keys.malformed("q"), "something else"),
    "a stream at its end": ("XADD", keys.malformed("q"), f"{2**64 - 1}-{2**64 - 1}", "a", "b"),
}


@pytest.mark.parametrize("name", SPOILT_LETTERS)
async def test_junk_where_letters_are_kept_makes_room_and_holds_up_no_entry(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    await redis.execute_command(*SPOILT_LETTERS[name])
    async with running_worker(redis_url):
        await send(redis, nonsense="secret", id="junk")
        assert (await read_reply(redis, "junk")).end.code == "invalid_request"
        await eventually(lambda: is_queue_empty(redis))
        beside = await send(redis, prompt="beside", max_tokens=5)
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await read_stream(redis, keys.malformed("q"))
    assert letter["id"] == "junk"
    assert await redis.exists("penstock:{q}:junk:malformed")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "junk_set_aside" in line]
    assert keys.malformed("q") in line
    assert "secret" not in line


async def test_malformed_entries_push_out_no_request(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.reply("q", "real"), "something else")
    async with running_worker(redis_url, max_dead_entries=50, max_dead_bytes=20_000, max_body_bytes=4096):
        await send(redis, prompt="x", id="real")
        await eventually(lambda: redis.xlen(keys.dead("q")))
        for i in range(100):
            await send(redis, nonsense=f"{i}" * 100)
            await send(redis, prompt="x" * 10_000)
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
    assert letter["id"] == "real"
    assert await redis.xlen(keys.malformed("q")) <= 5
    kept = [len("".join(part for pair in fields.items() for part in pair))
            for _, fields in await read_stream(redis, keys.malformed("q"))]  # fmt: skip
    assert 0 < sum(kept) <= 2000
    assert await redis.get(keys.letter_bytes(keys.malformed("q"))) == str(sum(kept))


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


async def test_keys_of_another_type_are_a_dead_letter_and_no_more(redis_url: str, redis: RedisClient) -> None:
    await redis.set(keys.reply("q", "taken"), "something else")
    async with running_worker(redis_url):
        await send(redis, prompt="x", id="taken")
        beside = await send(redis, prompt="beside", max_tokens=5)
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
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
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
    assert letter["code"] == "reply_unwritable"


@pytest.mark.parametrize("way", ["new", "left by a dead worker"])
async def test_many_large_entries_hold_up_nobody(redis_url: str, redis: RedisClient, way: str) -> None:
    """Together the entries are far more than a worker should hold, or could read before a time-out."""
    await redis.xgroup_create(keys.requests("q"), keys.GROUP, id="0", mkstream=True)
    large = [await send(redis, prompt="x" * 20_000_000, id=f"large{number}") for number in range(12)]
    if way != "new":
        await redis.xreadgroup(keys.GROUP, "dead", {keys.requests("q"): ">"}, count=1)  # one body is enough of that
        await redis.xclaim(keys.requests("q"), keys.GROUP, "dead", 0, [*large], justid=True, force=True)
        await redis.xgroup_setid(keys.requests("q"), keys.GROUP, large[-1])
    small = await send(redis, prompt="small", max_tokens=5)
    async with running_worker(redis_url, max_body_bytes=1000):
        assert (await read_reply(redis, small)).text() == expected_text("small", small, 5)
        for number in range(12):
            end = (await read_reply(redis, f"large{number}")).end
            assert (end.finish_reason, end.code) == ("error", "too_large")
            assert f"{20_000_000 + len('promptid') + len(f'large{number}')} bytes" in (end.message or "")
        await eventually(lambda: is_queue_empty(redis))


SPOILT_KEYS: dict[str, tuple[str | int, ...]] = {
    "a state of another type": ("SET", keys.state("q", "x"), "something else"),
    "a count that is none": ("HSET", keys.state("q", "x"), "status", "running", "crashes", "many"),
    "a state of nonsense": (
        "HSET",
        keys.state("q", "x"),
        "status",
        "?",
        "epoch",
        "1e300",
        "attempts",
        "-",
        "entry",
        "",
    ),
    "a cancel flag of another type": ("RPUSH", keys.cancel("q", "x"), "something else"),
}


@pytest.mark.parametrize("name", SPOILT_KEYS)
async def test_whatever_its_keys_hold_a_request_ends(redis_url: str, redis: RedisClient, name: str) -> None:
    await redis.execute_command(*SPOILT_KEYS[name])
    async with running_worker(redis_url) as worker:
        await send(redis, prompt="x", id="x", max_tokens=5)
        end = (await read_reply(redis, "x")).end
        await eventually(lambda: is_queue_empty(redis))
        assert end.code in ("reply_unwritable", None)
        beside = await send(redis, prompt="beside", max_tokens=5)
        assert (await read_reply(redis, beside)).text() == expected_text("beside", beside, 5)
        assert not worker.task.done()


async def test_a_reply_with_the_largest_id_is_a_dead_letter(redis_url: str, redis: RedisClient) -> None:
    await redis.xadd(keys.reply("q", "x"), {"type": "chunk"}, id=f"{2**64 - 1}-{2**64 - 1}")
    async with running_worker(redis_url):
        await send(redis, prompt="x", id="x", max_tokens=5)
        await eventually(lambda: redis.xlen(keys.dead("q")))
        await eventually(lambda: is_queue_empty(redis))
    ((_, letter),) = await read_stream(redis, keys.dead("q"))
    assert (letter["code"], letter["field:prompt"]) == ("reply_unwritable", "x")


@pytest.mark.parametrize(
    "junk", [{"finish_reason": "because"}, {"offset": "-1"}, {"index": "7"}, {"tokens": "a"}, {"tokens": "9" * 5000}]
)
async def test_a_journal_of_junk_ends_as_unreadable(redis_url: str, redis: RedisClient, junk: dict[str, str]) -> None:
    await send(redis, prompt="x", id="x", max_tokens=5, n=2)
    claim = await take_and_claim(redis, "dead", "x")
    chunk = {"type": "chunk", "index": "0", "offset": "0", "text": "a", "tokens": "7", **junk}
    await redis.xadd(keys.reply("q", "x"), chunk, id=f"{claim.epoch}-1")  # type: ignore[arg-type]
    async with running_worker(redis_url):
        newest: dict[str, str] = {}
        while newest.get("type") != "end":
            _, newest = (await read_stream(redis, keys.reply("q", "x")))[-1]
            await asyncio.sleep(0.02)
        await eventually(lambda: is_queue_empty(redis))
    assert (newest["finish_reason"], newest["code"]) == ("error", "reply_unreadable")
