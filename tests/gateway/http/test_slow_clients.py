"""Clients that do not read cost no memory, and delay nobody else's answer."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import ChunkEntry, encode_reply
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import CHAT, bare_client, chat
from tests.support.programs.gateway_harness import Running, announce, running_gateway

CHUNK = "x" * 8192
NUM_CHUNKS = 5000  # many times what is read ahead
KEY = {"Idempotency-Key": "k"}
BODY = chat(stream=True)


@pytest.fixture
async def gateway(redis: RedisClient, redis_url: str) -> AsyncIterator[Running]:
    async def answer_at_length(reply: ScriptedReply) -> None:
        await reply.own()
        async with reply.worker.redis.pipeline(transaction=False) as pipe:
            for number in range(NUM_CHUNKS):
                entry = encode_reply(ChunkEntry(index=0, offset=number, text=CHUNK, tokens=(number,)))
                pipe.xadd(keys.reply("default", reply.id), entry, id=f"1-{number + 1}")  # type: ignore[arg-type]
            await pipe.execute()
        reply.number, reply.tokens[0] = NUM_CHUNKS + 1, NUM_CHUNKS
        await reply.end()

    await announce(redis)
    async with (
        ScriptedWorker(redis_url, answer_at_length),
        running_gateway(redis_url, stall_timeout_s=10 * WAIT_S) as gateway,
    ):
        yield gateway


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def ask_and_not_read(gateway: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    return reader, writer


def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def count_chunks(gateway: Running) -> int:
    async with bare_client(gateway) as client:
        return int((await client.post(CHAT, json=BODY, headers=KEY)).content.count(CHUNK.encode()))


@pytest.mark.usefixtures("traced")
async def test_what_a_client_does_not_read_stays_in_redis(gateway: Running) -> None:
    before = memory()
    reader, writer = await ask_and_not_read(gateway)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert await count_chunks(gateway) == NUM_CHUNKS  # all of the reply has come to the gateway by now
    await eventually(lambda: memory() - before < NUM_CHUNKS * len(CHUNK) / 2)
    async with asyncio.timeout(WAIT_S):
        rest = await reader.read(-1)
    assert rest.count(CHUNK.encode()) == NUM_CHUNKS
    writer.close()
    await writer.wait_closed()
