"""A client's commands to Redis besides waiting for replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.producer import QueueFull, ReplyGone, UnknownRequest, transport
from penstock.producer.arguments import check_name
from penstock.producer.connections import Connections
from penstock.producer.patience import Patience
from penstock.producer.transport import Transport
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, EndEntry, GenerateRequest, OwnEntry, encode_reply
from tests.support.patience import eventually
from tests.support.redis_servers.streams import read_stream

pytestmark = pytest.mark.every_server


@pytest.fixture
async def line(redis_url: str) -> AsyncIterator[Transport]:
    connections = Connections(redis_url, reconnect_timeout_s=60.0)
    made = Transport(connections, queue="q", max_queue_length=2, dedupe_window_s=60)
    yield made
    await made.close()
    await connections.close()


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(prompt="x", id=request_id)


async def write_reply(redis: RedisClient, num_chunks: int) -> None:
    entries = [OwnEntry(worker="w", epoch=1)]
    chunks = [ChunkEntry(index=0, offset=place, text="x", tokens=(place,)) for place in range(num_chunks)]
    for number, entry in enumerate([*entries, *chunks]):
        await redis.xadd(keys.reply("q", "r"), encode_reply(entry), id=f"1-{number}")  # type: ignore[arg-type]


async def test_a_full_queue_is_waited_for_where_that_is_wanted(redis: RedisClient, line: Transport) -> None:
    await line.enqueue(request("a"))
    await line.enqueue(request("b"))
    with pytest.raises(QueueFull):
        await line.enqueue(request("c"))
    waiting = asyncio.create_task(line.send_with_patience(Patience(line.connections), request("c")))
    (entry_id, _), *_ = await read_stream(redis, keys.requests("q"))
    await redis.xdel(keys.requests("q"), entry_id)
    await waiting
    assert await redis.xlen(keys.requests("q")) == 2


@pytest.mark.parametrize(
    ("status", "beats", "state"),
    [(None, False, "queued"), ("running", True, "running"), ("running", False, "lost"), ("queued", False, "queued")],
)
async def test_the_state_is_what_the_server_says(
    redis: RedisClient, line: Transport, status: str | None, beats: bool, state: str
) -> None:
    await line.enqueue(request("r"))
    if status is not None:
        await redis.hset(keys.state("q", "r"), mapping={"status": status, "worker": "w"})
    if beats:
        await redis.set(keys.heartbeat("q", "w"), "i")
    assert await line.state("q", "r") == state
    assert await line.state("another", "r") == "unknown"


async def test_a_request_has_finished_once_its_end_can_be_read(redis: RedisClient, line: Transport) -> None:
    """The worker may record the end later, or die before it does."""
    await redis.hset(keys.state("q", "r"), mapping={"status": "running", "worker": "w"})
    end = EndEntry(finish_reason="stop", prompt_tokens=1, completion_tokens=0)
    await redis.xadd(keys.reply("q", "r"), encode_reply(end), id="1-0")  # type: ignore[arg-type]
    assert await line.state("q", "r") == "finished"


async def test_history_is_read_in_pages_up_to_the_entry_asked_for(
    redis: RedisClient, line: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HISTORY_PAGE", 3)
    await write_reply(redis, num_chunks=8)
    for until in ("1-0", "1-2", "1-3", "1-8"):
        read = [entry_id async for entry_id, _ in line.history("q", "r", until)]
        assert read == [f"1-{number}" for number in range(int(until[2:]) + 1)]
    for missing in ("1-9", "2-0"):
        with pytest.raises(ReplyGone, match=missing):
            _ = [entry async for entry in line.history("q", "r", missing)]


async def test_presence(redis: RedisClient, line: Transport) -> None:
    with pytest.raises(UnknownRequest):
        await line.check_present("q", "r")
    await line.enqueue(request("r"))
    await line.check_present("q", "r")
    await redis.hset(keys.state("q", "r"), "status", "done")
    with pytest.raises(ReplyGone, match="ended and expired"):
        await line.check_present("q", "r")


async def test_what_was_sent_and_left_no_trace_is_gone_and_not_waited_for(redis: RedisClient, line: Transport) -> None:
    """The mark of the enqueue outlives the state and the reply by far."""
    assert not await line.enqueue(request("r"))
    assert await line.enqueue(request("r"))
    ((entry_id, _),) = await read_stream(redis, keys.requests("q"))
    await redis.xdel(keys.requests("q"), entry_id)
    for look in (line.check_present, line.state):
        with pytest.raises(ReplyGone, match="ended and expired"):
            await look("q", "r")
    await write_reply(redis, num_chunks=1)
    await line.check_present("q", "r")


async def test_what_is_sent_again_after_its_reply_has_expired_is_gone(redis: RedisClient, line: Transport) -> None:
    await line.send(request("r"))
    await redis.set(keys.seen("q", "r"), keys.NO_ENTRY, keepttl=True)
    with pytest.raises(ReplyGone, match="ended and expired"):
        await line.send(request("r"))
    await write_reply(redis, num_chunks=1)  # it is there still
    await line.send(request("r"))


async def test_what_only_one_waiter_knew_is_cancelled_when_it_goes(redis: RedisClient, line: Transport) -> None:
    await line.status()  # connects: without a connection nothing was sent
    for request_id in ("kept", "gone", "closed"):
        line.own(request_id)
    line.disown("kept", cancel=False)
    line.disown("gone", cancel=True)
    line.disown("gone", cancel=True)
    await eventually(lambda: redis.exists(keys.cancel("q", "gone")))
    await line.close()
    assert await redis.exists(keys.cancel("q", "closed"))
    assert not await redis.exists(keys.cancel("q", "kept"))


@pytest.mark.parametrize("name", ["", " ", "a b", "ä", "x" * 129, "a/b", "{a}", "a\n"])
def test_what_cannot_be_part_of_a_key_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"queue .* is not 1 to 128 of the characters"):
        check_name("queue", name)


@pytest.mark.parametrize("name", ["a", "x" * 128, "A-z_0.9:b"])
def test_what_can_is(name: str) -> None:
    check_name("queue", name)
