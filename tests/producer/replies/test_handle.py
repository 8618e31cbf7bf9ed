"""Streams of one reply, and their deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from penstock.producer import AsyncClient, Chunk, ReplyCorrupt, ReplyTimeout
from penstock.producer.handle import ReplyStream
from penstock.producer.reading.assembly import Assembler
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker


async def test_a_stream_has_its_reply_only_at_its_end(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        stream = client.stream("a b c")
        texts = []
        async for chunk in stream:
            texts.append(chunk.text)
            assert stream.reply is None
        assert texts == ["a", " b", " c"]
        assert stream.reply is not None
        assert stream.reply.text == "a b c"
        assert (await stream.read_to_end()).request_id == stream.request_id


async def test_chunks_that_are_there_come_together_and_what_breaks_after_them(redis_url: str) -> None:
    async def break_off(reply: ScriptedReply) -> None:
        await reply.own()
        for text in ("a", "b"):
            await reply.chunk(text)
        await reply.chunk("d", offset=7)

    async with ScriptedWorker(redis_url, break_off), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        with pytest.raises(ReplyCorrupt):
            await handle.result()
        batches = handle.stream().batches()  # the reply is complete
        assert [chunk.text for chunk in await anext(batches)] == ["a", "b"]
        with pytest.raises(ReplyCorrupt, match="only 2 came before"):
            await anext(batches)


async def test_a_chunk_is_not_held_back_for_what_is_none(redis: RedisClient, redis_url: str) -> None:
    """After a takeover from a server that has lost the last entries, tokens come again, and then nothing."""

    async def repeat(reply: ScriptedReply) -> None:
        await reply.own()
        await reply.chunk("a")
        reply.epoch = 2
        await reply.own()
        await reply.chunk("a", offset=0)

    async with ScriptedWorker(redis_url, repeat), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        await eventually(lambda: _has_entries(redis, handle.id, 4))
        async with handle.stream() as stream:
            assert [chunk.text for chunk in await anext(stream.batches())] == ["a"]


async def _has_entries(redis: RedisClient, request_id: str, count: int) -> bool:
    return await redis.xlen(keys.reply("default", request_id)) == count


async def test_leaving_the_block_ends_the_reading() -> None:
    closed = asyncio.Event()

    async def batches() -> AsyncGenerator[list[Chunk], None]:
        try:
            while True:
                yield [Chunk("x", (1,), 0, 0, None, "1-1")]
        finally:
            closed.set()

    async with ReplyStream("r", batches(), Assembler("r")) as stream:
        assert (await anext(stream)).text == "x"
        assert not closed.is_set()
    assert closed.is_set()


async def test_a_deadline_runs_from_the_call_and_not_from_each_chunk(redis_url: str) -> None:
    async def drip(reply: ScriptedReply) -> None:
        await reply.own()
        for _ in range(1000):
            await reply.chunk("x")
            await asyncio.sleep(0.02)

    async with ScriptedWorker(redis_url, drip), AsyncClient(redis_url) as client:
        handle = await client.submit("x")
        async for _ in handle.stream():
            break
        with pytest.raises(ReplyTimeout, match=r"within 0\.3 s") as timed_out:
            async for _ in handle.stream(timeout=0.3):
                pass
        assert (timed_out.value.request_id, timed_out.value.timeout_s) == (handle.id, 0.3)
        assert await handle.state() == "running"


async def test_a_handle_says_which_request_it_is(redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        assert repr(client.handle("r")) == "<Handle r in queue 'q'>"
        assert repr(client.handle("r", queue="other")) == "<Handle r in queue 'other'>"
