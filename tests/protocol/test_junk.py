"""A script that fails over a key's content finds the key, and goes on if that may be set aside."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.protocol import keys
from penstock.protocol.key_kinds import KeyKind
from penstock.protocol.lua import call
from penstock.protocol.queue.junk import Guard
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import JunkFound
from tests.support.redis_servers.junk import QUEUE_KINDS, WRONG_TYPES

pytestmark = pytest.mark.every_server

WORKERS = Guard(stays=frozenset({"requests"}))
ADD = "redis.call('SET', KEYS[2], 'before') return {redis.call('ZADD', KEYS[1], 1, ARGV[1]), KEYS[1]}"
DUE, PLACE = keys.due("q"), "penstock:{q}:junk:lanes:due"


async def test_what_is_in_the_way_gets_another_name_and_one_line(raw: RedisClient) -> None:
    command = call(ADD, (DUE, "k{q}"), ("1-1",))
    with capture_logs() as logs:
        for number in range(3):
            await raw.delete(DUE)
            await raw.set(DUE, f"junk {number}")
            assert await WORKERS.execute_one(raw, command) == [1, DUE.encode()]
    assert [await raw.get(place) for place in (PLACE, f"{PLACE}/2", f"{PLACE}/3")] == [b"junk 0", b"junk 1", b"junk 2"]
    assert [(log["key"], log["place"]) for log in logs] == [(DUE, PLACE), (DUE, f"{PLACE}/2"), (DUE, f"{PLACE}/3")]


async def test_what_goes_well_is_sent_once(raw: RedisClient) -> None:
    await raw.config_resetstat()
    assert await WORKERS.execute_one(raw, call("return 1", (DUE,), ())) == 1
    assert "cmdstat_renamenx" not in await raw.info("commandstats")


@pytest.mark.parametrize("key", [keys.requests("q"), keys.state("q", "x"), keys.reply("q", "x")])
async def test_what_nobody_can_make_anew_stays_and_is_named(raw: RedisClient, key: str) -> None:
    await raw.set(key, "junk")
    for command in (call("return redis.call('XLEN', KEYS[1])", (key,), ()), ("XLEN", key)):
        with pytest.raises(JunkFound) as raised:
            await WORKERS.execute_one(raw, command)
        assert raised.value.key == key
        with pytest.raises(JunkFound):
            await Guard().execute_one(raw, command)
    assert await raw.get(key) == b"junk"


async def test_a_full_house_of_junk_stays(raw: RedisClient) -> None:
    """No junk replaces other junk."""
    for number in range(64):
        await raw.set(PLACE if number == 0 else f"{PLACE}/{number + 1}", "junk")
    await raw.set(DUE, "more")
    with pytest.raises(JunkFound):
        await WORKERS.execute_one(raw, ("ZADD", DUE, 1, "1-1"))
    assert await raw.get(DUE) == b"more"


@pytest.mark.parametrize("kind", [kind for kind in QUEUE_KINDS if kind.name != "wake"], ids=lambda kind: kind.name)
async def test_each_kind_of_key_is_made_room_for_or_named(raw: RedisClient, kind: KeyKind) -> None:
    key = kind.key(
        queue="q", tenant="t", priority=0, worker="w", request_id="x", mailbox="m", kind="d", letters=keys.dead("q")
    )
    write = WRONG_TYPES["list"]
    await write(raw, key)
    before = await raw.dump(key)
    place = WORKERS.place_for(key)
    reads = {"string": "GET", "hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "stream": "XLEN"}
    command = (reads[kind.type], key)
    if place is None:
        with pytest.raises(JunkFound):
            await WORKERS.execute_one(raw, command)
        place = key
    else:
        assert await WORKERS.execute_one(raw, command) in (0, None)
    assert await raw.dump(place) == before


async def test_a_mistake_of_ours_is_no_junk(raw: RedisClient) -> None:
    with pytest.raises(Exception, match=r"user_script|attempt to"):
        await WORKERS.execute_one(raw, call("return nil + redis.call('ZCARD', KEYS[1])", (DUE,), ()))
    assert await raw.keys("*junk*") == []
