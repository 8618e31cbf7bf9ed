"""A rolling update under load, to a version with more fields on the wire and back, loses nothing and shows no error."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.deploy.fleets import next_version
from tests.deploy.rolling_load import CLIENTS, two_versions, under_load
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.programs.worker_harness import is_queue_empty
from tests.support.redis_servers.streams import read_stream


async def answer_to_the_new_field(redis: RedisClient, request_id: str) -> str | None:
    """Sends a request with the field that only one version knows; returns how it ends."""
    fields = {"id": request_id, "prompt": "x", "max_tokens": "1", "hint": "new"}
    await redis.xadd(keys.requests("q"), fields)  # type: ignore[arg-type]
    entries: list[dict[str, str]] = []

    async def has_ended() -> bool:
        entries[:] = [entry for _, entry in await read_stream(redis, keys.reply("q", request_id))]
        return bool(entries) and entries[-1]["type"] == "end"

    await eventually(has_ended)
    return entries[-1].get("code")


async def test_nothing_is_lost_and_no_error_is_seen(redis_url: str, redis: RedisClient, tmp_path: Path) -> None:
    trees = {"old": ROOT, "new": next_version(tmp_path / "tree")}
    async with two_versions(trees, redis, redis_url, tmp_path) as (fleet, old, new):
        assert await answer_to_the_new_field(redis, "before") == "invalid_request"  # the versions do differ

        async with under_load(fleet.service) as go_on:
            await go_on()
            await fleet.roll_workers(new.start)  # workers before clients that use what is new: docs/wire.md
            await go_on()
            await fleet.roll_gateways(trees["new"])
            await go_on()
            await fleet.roll_gateways(trees["old"])  # and all the way back
            await go_on()
            assert await answer_to_the_new_field(redis, "between") is None
            await fleet.roll_workers(old.start)
            await go_on()

        owners, has_hint = await what_replies_tell(redis)
        assert any(len(each) > 1 for each in owners)  # went on where another worker had stopped
        assert {name.partition("-")[0] for each in owners for name in each} == {"old", "new"}
        assert any(has_hint)
        assert not all(has_hint)
        await eventually(lambda: is_queue_empty(redis))  # a worker removes a request just after the end of its reply
        assert not await redis.exists(keys.dead("q"))
        assert await redis.xlen(keys.malformed("q")) == 1  # that of `before`
    assert fleet.service.num_answered > 5 * CLIENTS


async def what_replies_tell(redis: RedisClient) -> tuple[list[list[str]], list[bool]]:
    """Returns for each reply the workers that wrote it, and whether its end has the new field."""
    owners, has_hint = [], []
    async for key in redis.scan_iter("penstock:q:*:reply"):
        entries = [entry for _, entry in await read_stream(redis, key)]
        owners.append([entry["worker"] for entry in entries if entry["type"] == "own"])
        has_hint.append("hint" in entries[-1])
    return owners, has_hint
