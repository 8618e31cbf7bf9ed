"""`penstock dead`: letters are listed, shown, sent again and removed."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from penstock.cli import run
from penstock.protocol import keys
from penstock.protocol.operations import dead_letters
from penstock.protocol.redis.connection import RedisClient
from tests.support.letters import add_letter
from tests.support.redis_servers.streams import add_entry, read_stream

pytestmark = pytest.mark.every_server


async def penstock(redis_url: str, *arguments: str) -> int:
    """Runs the command in a thread of this process, which is quick."""
    return await asyncio.to_thread(run, [*arguments, "--redis-url", redis_url, "--queue", "q"])


async def test_list_and_show(redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]) -> None:
    letter = await add_letter(redis, "evil\x1b[31m", prompt="say\x1b[2J")
    await add_letter(redis, "b", "too_large")
    for epoch, worker in ((1, "first"), (2, "second")):
        await redis.xadd(keys.reply("q", "evil\x1b[31m"), {"type": "own", "worker": worker}, id=f"{epoch}-0")
        await redis.xadd(keys.reply("q", "evil\x1b[31m"), {"type": "chunk"}, id=f"{epoch}-1")
    assert await penstock(redis_url, "dead", "list") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.index("too_large") < out.index("too_many_crashes")  # the newest first
    assert await penstock(redis_url, "dead", "list", "--json", "--limit", "1") == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == "b"
    assert await penstock(redis_url, "dead", "show", letter) == 0
    out = capsys.readouterr().out
    assert "claim:        2 by second" in out
    assert "\x1b" not in out
    assert await penstock(redis_url, "dead", "show", letter, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["request"] == {"prompt": "say\x1b[2J"}
    assert (shown["crashes"], shown["enqueued_at"]) == (3, "1970-01-01T00:00:01Z")
    assert await penstock(redis_url, "dead", "show", "nobody") == 1
    assert "no dead letter 'nobody'" in capsys.readouterr().err


async def test_replay_command(redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]) -> None:
    await add_letter(redis, "a", prompt="x")
    await add_letter(redis, "big", "too_large")
    await add_letter(redis, "b", prompt="x")
    assert await penstock(redis_url, "dead", "replay") == 2
    assert await penstock(redis_url, "dead", "replay", "--all", "a") == 2
    capsys.readouterr()
    assert await penstock(redis_url, "dead", "replay", "--all") == 1
    captured = capsys.readouterr()
    entries = [fields["id"] for _, fields in await read_stream(redis, keys.requests("q"))]
    assert captured.out.split() == entries
    assert [entry.partition(".")[0] for entry in entries] == ["a", "b"]
    assert "holds no request to send again" in captured.err
    assert await redis.xlen(keys.dead("q")) == 1


async def test_purge_command(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.xadd(keys.dead("q"), {"id": "old", "code": "c"}, id="5-0")
    for code in ("c", "c", "d"):
        await add_letter(redis, "a", code, prompt="x")
    assert await penstock(redis_url, "dead", "purge") == 2
    assert await penstock(redis_url, "dead", "purge", "--older-than", "soon") == 2
    assert await penstock(redis_url, "dead", "purge", "--older-than", "1h", "--yes") == 0
    assert await redis.xlen(keys.dead("q")) == 3
    assert await penstock(redis_url, "dead", "purge", "--code", "d", "-y") == 0
    assert await redis.xlen(keys.dead("q")) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert await penstock(redis_url, "dead", "purge", "--all") == 1
    assert await redis.xlen(keys.dead("q")) == 2
    assert await penstock(redis_url, "dead", "purge", "a", "--yes") == 0
    assert await redis.xlen(keys.dead("q")) == 0
    capsys.readouterr()
    assert await penstock(redis_url, "dead", "purge", "--all", "--yes") == 0
    assert capsys.readouterr().out == "nothing to remove\n"


async def test_malformed_entries_are_shown_and_removed_apart(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    real = await add_letter(redis, "real", prompt="x")
    junk = await add_letter(redis, "junk", "invalid_request", kind="malformed", nonsense="y")
    await add_letter(redis, "junk2", "too_large", kind="malformed")

    async def said(*arguments: str) -> str:
        assert await penstock(redis_url, "dead", *arguments) == 0
        return capsys.readouterr().out

    listed = await said("list")
    assert "real" in listed
    assert "junk" not in listed
    assert listed.endswith("beside them 2 malformed entries; --malformed lists these\n")
    assert "has 1 dead letters, none with code invalid_request\nbeside" in await said(
        "list", "--code", "invalid_request"
    )
    listed = await said("list", "--malformed", "--limit", "1")
    assert "too_large" in listed
    assert "real" not in listed
    assert listed.endswith("1 of 2 malformed entries; --limit shows more\n")
    assert [json.loads(line)["kind"] for line in (await said("list", "--malformed", "--json")).splitlines()] == [
        "malformed", "malformed",
    ]  # fmt: skip
    assert "kind:         malformed" in await said("show", "--malformed", "junk")
    assert await penstock(redis_url, "dead", "show", "junk") == 1
    assert "'junk' among its malformed entries: add --malformed" in capsys.readouterr().err
    assert await penstock(redis_url, "dead", "show", "--malformed", "real") == 1
    assert "no malformed entry 'real'" in capsys.readouterr().err
    assert "kind:         request" in await said("show", real)

    assert await said("purge", "--code", "too_large", "--yes") == "nothing to remove\n"
    assert await said("purge", "--malformed", "--code", "too_large", "--yes") == "removed 1\n"
    assert await said("replay", "--malformed", "--all") == f"junk.replay-{junk}\n"
    await add_letter(redis, "junk", "invalid_request", kind="malformed", nonsense="y")
    assert await said("purge", "--malformed", "junk", "--yes") == "removed 1\n"
    assert (await redis.xlen(keys.dead("q")), await redis.xlen(keys.malformed("q"))) == (1, 0)
    assert await said("purge", real, "--yes") == "removed 1\n"


async def test_a_letter_of_an_entry_from_the_far_future(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str]
) -> None:
    letter = {"id": "a", "entry": f"{2**64 - 1}-{2**64 - 1}", "code": "too_many_crashes", "field:prompt": "x"}
    await add_entry(redis, keys.dead("q"), letter)
    assert await penstock(redis_url, "dead", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["enqueued_at"] == f"after the year 9999 ({2**64 - 1} ms)"
    await add_entry(redis, keys.dead("q"), letter, entry_id="253402300799999-1")
    assert await penstock(redis_url, "dead", "list") == 0
    assert await penstock(redis_url, "dead", "show", "a") == 0
    assert "9999-12-31T23:59:59Z" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "junk", "9" * 5000, b"\xff", "-1"], ids=lambda value: repr(value[:5]))
async def test_a_letter_that_a_stranger_wrote_is_shown(
    redis_url: str, redis: RedisClient, capsys: pytest.CaptureFixture[str], value: str | bytes
) -> None:
    fields = dict.fromkeys(["entry", "code", "message", "worker", *dead_letters.COUNTS], value)
    letter = await add_entry(redis, keys.dead("q"), {"id": "x", **fields})
    assert await penstock(redis_url, "dead", "list") == 0
    assert letter in capsys.readouterr().out
    assert await penstock(redis_url, "dead", "show", letter, "--json") == 0
    assert json.loads(capsys.readouterr().out)["enqueued_at"] is None
