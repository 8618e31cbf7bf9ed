"""Streams of one reply, and the deadline over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from fakes import ScriptedReply, ScriptedWorker

from penstock.producer import AsyncClient, Chunk, ReplyTimeout
from penstock.producer.handle import ReplyStream
from penstock.producer.reading.assembly import Assembler


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


async def test_leaving_the_block_ends_the_reading() -> None:
    closed = asyncio.Event()

    async def chunks() -> AsyncGenerator[Chunk, None]:
        try:
            while True:
                yield Chunk("x", (1,), 0, 0, None, "1-1")
        finally:
            closed.set()

    async with ReplyStream("r", chunks(), Assembler("r")) as stream:
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
