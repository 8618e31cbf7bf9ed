"""Behind a proxy that cuts connections after the server acted, what the official client asks for is made once."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.protocol.redis.connection import RedisClient
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import Listening, announce, running_gateway

NUM_CALLS = 120
MAX_RETRIES = 5
CUT_SHARE = 0.3


class CuttingProxy:
    """Cuts some answers once their first bytes are there, and passes on those bytes or nothing.

    Each answer is as likely to be cut, but those to one Idempotency-Key are never cut more often than a client retries.
    """

    def __init__(self, to: Listening, seed: int) -> None:
        self._port = to.port
        self._chance = random.Random(seed)
        self._cuts_left: dict[bytes, int] = {}
        self.num_cut: Counter[bytes] = Counter()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Listening]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        async with server:
            yield Listening(server.sockets[0].getsockname()[1])

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        keys: list[bytes] = []  # the last one is that of the current request
        try:
            await asyncio.gather(
                self._pass_requests(reader, server_writer, keys), self._pass_answers(server_reader, writer, keys)
            )
        except OSError:
            pass
        finally:
            for end in (writer, server_writer):
                end.transport.abort()

    async def _pass_requests(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, keys: list[bytes]
    ) -> None:
        while data := await source.read(65536):
            keys.extend(re.findall(rb"(?i)idempotency-key: (\S+)", data))
            target.write(data)
            await target.drain()
        raise ConnectionResetError

    async def _pass_answers(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, keys: list[bytes]
    ) -> None:
        while data := await source.read(65536):
            if data.startswith(b"HTTP/1.1") and self._is_to_be_cut(keys[-1]):
                if self._chance.random() < 0.5:
                    target.write(data[:100])
                    await target.drain()
                break
            target.write(data)
            await target.drain()
        raise ConnectionResetError

    def _is_to_be_cut(self, key: bytes) -> bool:
        if key not in self._cuts_left:
            self._cuts_left[key] = 0
            while self._cuts_left[key] < MAX_RETRIES and self._chance.random() < CUT_SHARE:
                self._cuts_left[key] += 1
        if not self._cuts_left[key]:
            return False
        self._cuts_left[key] -= 1
        self.num_cut[key] += 1
        return True


async def echo_chat(reply: ScriptedReply) -> None:
    assert reply.request.messages
    await reply.own()
    await reply.chunk(str(reply.request.messages[0].content))
    await reply.end()


async def test_calls_whose_answers_are_cut_generate_once(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
    await announce(redis)
    async with ScriptedWorker(redis_url, echo_chat) as worker, running_gateway(redis_url) as gateway:
        proxy = CuttingProxy(gateway, seed=3)
        async with (
            proxy.listening() as cutting,
            openai_client(cutting.url, max_retries=MAX_RETRIES) as client,
        ):

            async def ask(number: int) -> str | None:
                completion = await client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": f"call {number}"}],
                    extra_headers={"Idempotency-Key": f"key-{number}"},
                )
                return completion.choices[0].message.content

            answers = await asyncio.gather(*map(ask, range(NUM_CALLS)))
    assert answers == [f"call {number}" for number in range(NUM_CALLS)]
    assert len(worker.taken) == NUM_CALLS
    assert proxy.num_cut.total() > CUT_SHARE * NUM_CALLS / 2
    assert max(proxy.num_cut.values()) > 1
