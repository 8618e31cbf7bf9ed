"""Dead letters are written by a real worker, read, sent again once, and removed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.protocol import keys
from penstock.protocol.operations import dead_letters
from penstock.protocol.operations.dead_letters import Kind, Letter, NotReplayable
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.tools.chaos.fake_engine import expected_text
from tests.support.letters import add_letter
from tests.support.patience import eventually
from tests.support.programs.worker_harness import read_reply, running_worker, send
from tests.support.redis_servers.redis_proxy import RedisProxy
from tests.support.redis_servers.streams import read_stream

pytestmark = pytest.mark.every_server


async def all_letters(raw: RedisClient, kind: Kind = "request") -> list[Letter]:
    return [letter async for letter in dead_letters.read_letters(raw, "q", kind)]


async def test_a_replayed_request_runs_under_its_new_id(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    document = {"prompt": "hi", "max_tokens": 5, "seed": 7}
    await send(redis, request=json.dumps({**document, "id": "a", "unknown": 1}))
    async with running_worker(redis_url):
        assert (await read_reply(redis, "a")).end.code == "invalid_request"
        await eventually(lambda: redis.exists(keys.malformed("q")))
    (letter,) = await all_letters(raw, "malformed")
    assert (letter.request_id, letter.code, letter.counts["attempts"]) == ("a", "invalid_request", 1)
    assert letter.request() == {**document, "id": "a", "unknown": 1}

    await add_letter(redis, "a", request=json.dumps({**document, "id": "a"}))
    (letter,) = await all_letters(raw)
    new_id = await dead_letters.replay(raw, "q", letter)
    assert new_id == f"a.replay-{letter.id}"
    async with running_worker(redis_url):
        reply = await read_reply(redis, new_id)
    assert reply.text() == expected_text("hi", 7, 5)
    assert (await read_reply(redis, "a")).end.code == "invalid_request"  # the old end stays the last word
    assert await all_letters(raw) == []


async def test_flat_and_unreadable_requests_are_replayed_as_they_are(redis: RedisClient, raw: RedisClient) -> None:
    await add_letter(redis, "flat", prompt="x", max_tokens="3")
    await add_letter(redis, "broken", request="{not json")
    ids = [await dead_letters.replay(raw, "q", letter) for letter in await all_letters(raw)]
    entries = [fields for _, fields in await read_stream(redis, keys.requests("q"))]
    assert entries == [
        {"prompt": "x", "max_tokens": "3", "id": ids[0]},
        {"request": "{not json", "id": ids[1]},
    ]
    (group,) = await redis.xinfo_groups(keys.requests("q"))
    assert (group["name"], group["lag"]) == (keys.GROUP, 2)


async def test_ids_of_replays_do_not_grow_and_stay_ids(redis: RedisClient, raw: RedisClient) -> None:
    await add_letter(redis, "x" * 128, prompt="x")
    (first,) = await all_letters(raw)
    once = await dead_letters.replay(raw, "q", first)
    assert once is not None
    await add_letter(redis, once, prompt="x")
    (second,) = await all_letters(raw)
    twice = await dead_letters.replay(raw, "q", second)
    assert twice == "x" * 80 + f".replay-{second.id}"


async def test_a_letter_is_sent_once_whoever_replays_it(redis_url: str, redis: RedisClient, raw: RedisClient) -> None:
    await add_letter(redis, "a", prompt="x")
    (letter,) = await all_letters(raw)
    ids = await asyncio.gather(*(dead_letters.replay(raw, "q", letter) for _ in range(10)))
    assert set(ids) == {letter.replay_id}
    async with RedisProxy(redis_url) as proxy:  # the answer is lost, the library sends the script again
        await add_letter(redis, "b", prompt="x")
        (other,) = await all_letters(raw)
        client = connect(proxy.url, decode=False, retries=20)
        await client.ping()
        proxy.loss = 1.0
        asyncio.get_running_loop().call_later(0.3, setattr, proxy, "loss", 0.0)
        assert await dead_letters.replay(client, "q", other) == other.replay_id
        await client.aclose()
    assert proxy.num_lost
    assert await redis.xlen(keys.requests("q")) == 2
    await redis.delete(keys.seen("q", letter.replay_id))
    assert await dead_letters.replay(raw, "q", letter) is None
    assert await redis.xlen(keys.requests("q")) == 2


async def test_a_letter_without_its_request_stays(redis: RedisClient, raw: RedisClient) -> None:
    await add_letter(redis, "big", "too_large")
    (letter,) = await all_letters(raw)
    with pytest.raises(NotReplayable, match=letter.id):
        await dead_letters.replay(raw, "q", letter)
    assert len(await all_letters(raw)) == 1


async def test_letters_are_found_by_either_id_over_many_pages(redis: RedisClient, raw: RedisClient) -> None:
    ids = [await add_letter(redis, f"r{i % 60}", prompt="x") for i in range(120)]
    assert [letter.id for letter in await all_letters(raw)] == ids
    assert [letter.id async for letter in dead_letters.read_letters(raw, "q", newest_first=True)] == ids[::-1]
    assert [letter.id for letter in await dead_letters.find_letters(raw, "q", "r7")] == [ids[7], ids[67]]
    assert [letter.id for letter in await dead_letters.find_letters(raw, "q", ids[7])] == [ids[7]]
    assert await dead_letters.remove(raw, "q", "request", [*ids[:100], "1-1"]) == 100


async def test_a_letter_that_no_request_fits_in_stays(redis: RedisClient, raw: RedisClient) -> None:
    many: dict[str, Any] = {f"f{i}": "x" for i in range(10_000)}
    await add_letter(redis, "wide", prompt="x", **many)
    (letter,) = await all_letters(raw)
    with pytest.raises(NotReplayable, match="holds 10001 fields"):
        await dead_letters.replay(raw, "q", letter)
    assert len(await all_letters(raw)) == 1
