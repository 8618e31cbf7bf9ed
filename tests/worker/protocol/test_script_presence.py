"""The scripts on a heartbeat, against a real server: of two processes with one name, one has it."""

from __future__ import annotations

import pytest
from script_calls import STREAM, owned, owners, run

from penstock.producer import keys
from penstock.producer.redis.connection import RedisClient
from penstock.worker.protocol import scripts
from penstock.worker.protocol.scripts import Beaten, Rival

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

BEAT = keys.heartbeat("q", "w")
DRAIN = keys.drain("q", "w")


async def beat(redis: RedisClient, instance: str, ttl_ms: int = 10**6) -> Rival | str:
    """The rival, or else the mark to drain."""
    card = {"model": "m", "worker": "w"}
    command = scripts.beat(
        "q",
        worker="w",
        instance=instance,
        ttl_ms=ttl_ms,
        is_serving=False,
        must_match=True,
        card=card,
        model_ttl_ms=ttl_ms,
    )
    answer = scripts.parse_beat(await run(redis, command))
    return answer.drain_mark if isinstance(answer, Beaten) else answer


async def test_a_beat_sets_and_renews_the_key(raw: RedisClient) -> None:
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT) == b"i"
    await raw.pexpire(BEAT, 1000)
    assert await beat(raw, "i") == ""
    assert await raw.pttl(BEAT) > 1000


async def test_a_beat_tells_which_instance_is_to_drain(raw: RedisClient) -> None:
    await raw.set(DRAIN, "i")
    assert await beat(raw, "i") == "i"


async def test_a_rival_keeps_the_name_until_its_key_lapses(raw: RedisClient) -> None:
    await beat(raw, "first", ttl_ms=60_000)
    rival = await beat(raw, "second")
    assert isinstance(rival, Rival)
    assert rival.instance == "first"
    assert 0 < rival.left_s <= 60
    assert await raw.get(BEAT) == b"first"
    assert 0 < await raw.pttl(BEAT) <= 60_000
    await raw.delete(BEAT)
    assert await beat(raw, "second") == ""


async def test_a_key_without_expiry_is_nobody_s_and_set_aside(raw: RedisClient) -> None:
    await raw.set(BEAT, "by hand")
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT.replace("}:", "}:junk:")) == b"by hand"


async def test_what_is_no_text_is_nobody_s(raw: RedisClient) -> None:
    await raw.lpush(BEAT, "x")
    await raw.lpush(DRAIN, "x")
    assert await beat(raw, "i") == ""
    assert await raw.get(BEAT) == b"i"


async def test_leaving_takes_only_one_s_own_heartbeat_and_never_pending_entries(raw: RedisClient) -> None:
    await owned(raw, "a")
    await raw.set(keys.heartbeat("q", "a"), "i-new")
    assert await run(raw, scripts.leave("q", worker="a", instance="i-old")) == 0
    assert await run(raw, scripts.leave("q", worker="a", instance="i-new")) == 2
    assert await owners(raw) == {"a": 1}
    await raw.set(keys.heartbeat("q", "b"), "i")
    await raw.xgroup_createconsumer(STREAM, keys.GROUP, "b")
    assert await run(raw, scripts.leave("q", worker="b", instance="i")) == 2
    assert await owners(raw) == {"a": 1}
