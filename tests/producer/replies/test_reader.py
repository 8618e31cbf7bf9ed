"""All replies share one connection: promptly, through reconnects, and no reply suffers for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis import Redis as BlockingRedis

from penstock.local.embedded import EmbeddedServer
from penstock.producer import AsyncClient, ConnectionLost, ReplyCorrupt, ReplyGone, ReplyTimeout, ServerRefused
from penstock.producer.reading.entries import position
from penstock.producer.reading.subscription import MAX_ARRIVED
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import TEST_S, WAIT_S, eventually
from tests.support.programs.fakes import LossyProxy, ScriptedReply, ScriptedWorker, echo
from tests.support.redis_servers.clocks import ShiftedServer
from tests.support.redis_servers.streams import add_entry


async def readers(redis: RedisClient) -> list[dict[str, str]]:
    """Returns the reader connections that the server has."""
    return [client for client in await redis.client_list() if client["name"] == "penstock-reader"]


async def never(reply: ScriptedReply) -> None:
    """Leaves the request alone."""


class Script:
    """Behaviour of a worker that a test drives: `say` writes a chunk of the only reply."""

    def __init__(self) -> None:
        self._replies: asyncio.Queue[ScriptedReply] = asyncio.Queue()
        self.reply: ScriptedReply | None = None

    async def __call__(self, reply: ScriptedReply) -> None:
        await reply.own()
        self._replies.put_nowait(reply)

    async def say(self, text: str) -> None:
        if self.reply is None:
            self.reply = await self._replies.get()
        await self.reply.chunk(text)

    async def end(self) -> None:
        assert self.reply is not None
        await self.reply.end()


async def test_two_hundred_replies_come_over_one_connection(redis: RedisClient, redis_url: str) -> None:
    gate = asyncio.Event()

    async def in_pieces(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("a")
        await gate.wait()
        for text in ("b", "c"):
            await reply.chunk(text)
        await reply.end()

    async with ScriptedWorker(redis_url, in_pieces) as worker, AsyncClient(redis_url) as client:
        tasks = [asyncio.create_task(client.generate(str(number))) for number in range(200)]
        await eventually(lambda: len(worker.taken) == 200)
        assert len(await readers(redis)) == 1
        own = [each for each in await redis.client_list() if each["name"] == "penstock-client"]
        assert len(own) <= 16
        gate.set()
        replies = await asyncio.gather(*tasks)
        assert len(await readers(redis)) == 1
    assert {reply.text for reply in replies} == {"abc"}
    assert len({reply.request_id for reply in replies}) == 200


async def test_a_new_reply_does_not_wait_for_the_read_in_flight(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read blocks for longer than any test when nothing comes; the wake-up ends it."""
    monkeypatch.setattr("penstock.producer.reading.line.BLOCK_S", 10 * TEST_S)
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        worker.behave = never
        waiting = asyncio.create_task(client.generate("never answered"))
        await eventually(lambda: len(worker.taken) == 1)
        await asyncio.sleep(0.1)  # the reader is blocked by now
        worker.behave = echo
        for _ in range(20):
            await client.generate("x", timeout=WAIT_S)
        waiting.cancel()


async def test_a_reader_that_joins_while_a_read_is_under_way_misses_nothing(redis: RedisClient, redis_url: str) -> None:
    key = keys.reply("default", "r")
    entry = {"type": "own", "worker": "w", "epoch": "1"}
    await add_entry(redis, key, entry, entry_id="1-0")
    async with AsyncClient(redis_url) as client:
        reader = client._transport.reader
        early = reader.follow("default", "r")
        assert (await early.next())[0] == "1-0"
        await asyncio.sleep(0.05)  # the next read is blocked after 1-0 by now
        with BlockingRedis.from_url(redis_url) as plain:
            plain.xadd(key, entry, id="1-1")  # answers that read while this loop stands still
        late = reader.follow("default", "r")
        assert [(await late.next())[0] for _ in range(2)] == ["1-0", "1-1"]
        assert (await early.next())[0] == "1-1"


async def test_what_a_slow_reader_leaves_stays_in_redis(redis: RedisClient, redis_url: str) -> None:
    key, count = keys.reply("default", "r"), 5 * MAX_ARRIVED
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.xadd(key, {"type": "own", "worker": "w", "epoch": "1"}, id=f"1-{number}")
        await pipe.execute()
    async with AsyncClient(redis_url) as client:
        slow = client._transport.reader.follow("default", "r")
        quick = client._transport.reader.follow("default", "r")
        assert [(await quick.next())[0] for _ in range(count)] == [f"1-{number}" for number in range(count)]
        assert len(slow._arrived) < 2 * MAX_ARRIVED
        assert [(await slow.next())[0] for _ in range(count)] == [f"1-{number}" for number in range(count)]
        await redis.xadd(key, {"type": "own", "worker": "w", "epoch": "1"}, id=f"1-{count}")
        assert (await slow.next())[0] == (await quick.next())[0] == f"1-{count}"


async def test_a_paused_reader_that_ends_is_not_resumed(redis: RedisClient, redis_url: str) -> None:
    key = keys.reply("default", "r")
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(2 * MAX_ARRIVED):
            pipe.xadd(key, {"type": "own", "worker": "w", "epoch": "1"}, id=f"1-{number}")
        await pipe.execute()
    async with AsyncClient(redis_url) as client:
        gone = client._transport.reader.follow("default", "r")
        await eventually(lambda: len(gone._arrived) == MAX_ARRIVED)
        gone.close()
        for _ in range(MAX_ARRIVED):
            await gone.next()
        assert not client._transport.reader._lines[0]._all()


async def test_the_wake_up_stream_expires_and_is_removed(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url, never) as worker:
        client = AsyncClient(redis_url)
        tasks = []
        for count in range(1, 4):
            tasks.append(asyncio.create_task(client.generate("x")))
            await eventually(lambda count=count: len(worker.taken) == count)
            await asyncio.sleep(0.02)
        (key,) = await redis.keys("penstock:wake:*")
        assert await redis.xlen(key) == 1
        assert 0 < await redis.ttl(key) <= 60
        await client.close()
        assert not await redis.keys("penstock:wake:*")
        for task in tasks:
            with pytest.raises(ConnectionLost):
                await task


async def test_a_killed_connection_in_mid_reply_loses_nothing(redis: RedisClient, redis_url: str) -> None:
    script = Script()
    async with ScriptedWorker(redis_url, script), AsyncClient(redis_url) as client:
        stream = client.stream("x")
        first = asyncio.create_task(anext(stream))
        await script.say("a")
        got = [(await first).text]
        for text in "bcd":
            (reader,) = await readers(redis)
            await redis.client_kill_filter(_id=reader["id"])
            await script.say(text)
            got.append((await anext(stream)).text)
        await script.end()
        assert (await stream.read_to_end()).text == "".join(got) == "abcd"


async def test_an_outage_loses_nothing(redis_server: EmbeddedServer, redis_url: str) -> None:
    script = Script()
    async with (
        LossyProxy(redis_server.port) as proxy,
        ScriptedWorker(redis_server.url, script),
        AsyncClient(proxy.url) as client,
    ):
        handle = await client.submit("x")
        await script.say("a")
        stream = handle.stream()
        assert (await anext(stream)).text == "a"
        await proxy.refuse()
        await script.say("b")
        with pytest.raises(ReplyTimeout):
            await asyncio.create_task(client.handle(handle.id).stream(timeout=0.05).read_to_end())
        await proxy.listen()
        assert (await anext(stream)).text == "b"
        proxy.lose_next_answer_to(b"XREAD")
        proxy.cut()
        await script.say("c")
        await script.end()
        assert (await stream.read_to_end()).text == "abc"


async def test_a_long_outage_is_told_to_those_who_wait(redis_server: EmbeddedServer, redis_url: str) -> None:
    async with (
        LossyProxy(redis_server.port) as proxy,
        ScriptedWorker(redis_url, never),
        AsyncClient(proxy.url, reconnect_timeout_s=0.3) as client,
    ):
        handle = await client.submit("x")
        waits = [asyncio.create_task(handle.result()) for _ in range(2)]
        await asyncio.sleep(0.05)
        await proxy.refuse()
        for wait in waits:
            with pytest.raises(ConnectionLost, match="no connection to Redis at"):
                await wait
        await proxy.listen()
        later = asyncio.create_task(handle.result(timeout=0.2))
        with pytest.raises(ReplyTimeout):  # the reader works again
            await later


async def test_a_reply_that_expires_while_it_is_waited_for_is_gone(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.producer.reading.line.GONE_CHECK_S", 0.1)
    monkeypatch.setattr("penstock.producer.reading.line.BLOCK_S", 0.1)
    script = Script()
    async with ScriptedWorker(redis_url, script), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        await script.say("a")
        stream = handle.stream()
        await anext(stream)
        await redis.delete(keys.reply("default", handle.id))
        with pytest.raises(ReplyGone, match="read up to entry 1-1"):
            await anext(stream)


async def test_no_read_is_blocked_for_as_long_as_the_server_s_clock_was_set_back(
    shifted: ShiftedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.producer.reading.line.GONE_CHECK_S", 0.1)
    monkeypatch.setattr("penstock.producer.reading.line.BLOCK_S", 1.0)
    monkeypatch.setattr("penstock.producer.reading.line.LATE_S", 0.1)
    script = Script()
    async with ScriptedWorker(shifted.url, script), AsyncClient(shifted.url) as client:
        handle = await client.submit("x")
        await script.say("a")
        stream = handle.stream()
        await anext(stream)
        gone = asyncio.create_task(anext(stream))
        with BlockingRedis.from_url(shifted.url, protocol=2) as redis:
            await eventually(lambda: _is_blocked(redis))
            shifted.set_ahead(-100_000)
            redis.delete(keys.reply("default", handle.id))
        with pytest.raises(ReplyGone):
            await gone
    assert "reading replies" not in caplog.text  # it was not an outage


def _is_blocked(redis: BlockingRedis) -> bool:
    return any("b" in each["flags"] for each in redis.client_list() if each["name"] == "penstock-reader")


async def test_a_reply_that_came_and_expired_while_its_reader_was_away_is_gone(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was read, and only the mark of its worker is left."""
    monkeypatch.setattr("penstock.producer.reading.line.GONE_CHECK_S", 0.1)
    monkeypatch.setattr("penstock.producer.reading.line.BLOCK_S", 0.1)
    async with AsyncClient(redis_url) as client:
        handle, other = await client.submit("x"), await client.submit("y")
        waiting, stays = (asyncio.create_task(each.result()) for each in (handle, other))
        await eventually(lambda: _num_followed(client) == 2)
        await redis.set(keys.seen("default", handle.id), keys.NO_ENTRY, keepttl=True)
        with pytest.raises(ReplyGone):
            await waiting
        assert not stays.done()
        stays.cancel()


def _num_followed(client: AsyncClient) -> int:
    return sum(len(line._followed) for line in client._transport.reader._lines.values())


async def test_a_reply_that_expired_during_an_outage_is_gone(redis: RedisClient, redis_server: EmbeddedServer) -> None:
    script = Script()
    async with (
        LossyProxy(redis_server.port) as proxy,
        ScriptedWorker(redis_server.url, script),
        AsyncClient(proxy.url) as client,
    ):
        handle = await client.submit("x")
        await script.say("a")
        stream = handle.stream()
        await anext(stream)
        await proxy.refuse()
        await redis.delete(keys.reply("default", handle.id))
        await proxy.listen()
        await redis.set("unrelated", "x")
        other = asyncio.create_task(client.generate("y"))  # its wake-up ends the first read after the outage
        with pytest.raises(ReplyGone):
            await asyncio.wait_for(anext(stream), WAIT_S)
        other.cancel()


async def test_a_stream_that_can_not_be_read_is_its_reader_s_trouble_alone(redis: RedisClient, redis_url: str) -> None:
    script = Script()
    async with ScriptedWorker(redis_url, script), AsyncClient(redis_url) as client:
        good = asyncio.create_task(client.generate("x"))
        await script.say("a")
        await redis.set(keys.reply("default", "bad"), "no stream")
        with pytest.raises(ReplyCorrupt, match="is damaged"):
            await client.handle("bad").result(timeout=WAIT_S)
        await script.end()
        assert (await good).text == "a"


@pytest.fixture
async def restricted_url(redis: RedisClient, redis_server: EmbeddedServer) -> AsyncIterator[str]:
    """URL of a user that may only read replies."""
    rules = [
        "on",
        ">secret",
        "resetkeys",
        "-@all",
        "+xread",
        "+client|setname",
        "%R~penstock:*:reply",
    ]
    await redis.execute_command("ACL", "SETUSER", "reader", "reset", *rules)
    yield redis_server.url.replace("//", "//reader:secret@")
    await redis.execute_command("ACL", "DELUSER", "reader")


async def test_missing_permissions_are_told_at_once(redis: RedisClient, restricted_url: str) -> None:
    await redis.xadd(keys.reply("default", "mine"), {"type": "own", "worker": "w", "epoch": "1"}, id="1-0")
    async with AsyncClient(restricted_url) as client:
        with pytest.raises(ServerRefused, match=r"(?i)permission"):
            await client.handle("mine").result(timeout=WAIT_S)
        with pytest.raises(ServerRefused, match=r"(?i)permission"):
            await client.submit("x")


async def test_a_closed_subscription_is_read_no_more(redis: RedisClient, redis_url: str) -> None:
    async with ScriptedWorker(redis_url, never), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        with pytest.raises(ReplyTimeout):
            await handle.result(timeout=0.05)
        (line,) = client._transport.reader._lines.values()
        assert not line._followed


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "a-b", "1-1-1", "²-0", "*", "$"])
def test_what_is_no_entry_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an entry id"):
        position(text)


async def test_replies_are_read_under_protocol_3(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(f"{redis_url}?protocol=3") as client:
        assert (await client.generate("a b")).text == "a b"
        handle = await client.submit("c d")
        chunks = [chunk async for chunk in handle.stream()]
        assert [chunk.text async for chunk in handle.stream(after=chunks[0].entry_id)] == [" d"]
        assert await handle.state() == "finished"


async def test_the_client_works_over_a_unix_socket(redis_server: EmbeddedServer, redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_server.socket_url) as client:
        assert (await client.generate("a b")).text == "a b"
