"""Whatever strangers send gets a status; the process goes on, and others are served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from penstock.protocol.redis.connection import RedisClient
from penstock.serving.http.guard import NUM_ON_TOP
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import Running, announce, running_gateway
from tests.support.programs.gateway_process import GatewayProcess

BODY = b'{"model": "x", "messages": [{"role": "user", "content": "a"}]}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
POST = b"POST /v1/chat/completions HTTP/1.1"
SMUGGLED = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def request(*headers: bytes, first: bytes = POST, body: bytes = BODY, host: bytes | None = b"Host: x") -> bytes:
    return b"\r\n".join((first, *([host] if host else []), *headers, b"", body))


def get(path: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return request(*headers, first=b"GET %s HTTP/%s" % (path, version), body=b"")


REQUESTS: dict[str, tuple[bytes, list[int]]] = {
    # Where it ends is said twice, or in a way that others may read otherwise.
    "length_and_chunks": (request(LENGTH, CHUNKED, body=SMUGGLED), [400]),
    "chunks_and_length": (request(CHUNKED, LENGTH, body=SMUGGLED), [400]),
    "two_lengths": (request(LENGTH, b"Content-Length: 5"), [400]),
    "the_same_length_twice": (request(LENGTH, LENGTH), [400]),
    "a_list_of_lengths": (request(b"Content-Length: 14, 14"), [400]),
    "a_signed_length": (request(b"Content-Length: +14"), [400]),
    "a_negative_length": (request(b"Content-Length: -1"), [400]),
    "a_hexadecimal_length": (request(b"Content-Length: 0xe"), [400]),
    "a_length_beyond_numbers": (request(b"Content-Length: " + b"9" * 30), [400]),
    "a_space_before_the_colon": (request(b"Content-Length : 14"), [400]),
    "chunked_twice": (request(CHUNKED, CHUNKED, body=SMUGGLED), [400]),
    "chunked_and_more": (request(b"Transfer-Encoding: chunked, identity", body=SMUGGLED), [400]),
    "chunked_misspelled": (request(b"Transfer-Encoding: xchunked", body=SMUGGLED), [400]),
    "chunked_behind_a_tab": (request(b"Transfer-Encoding:\x0bchunked", LENGTH, body=SMUGGLED), [400]),
    "compressed_and_chunked": (request(b"Transfer-Encoding: gzip, chunked", body=SMUGGLED), [501]),
    "compressed_and_chunked_by_two": (request(b"Transfer-Encoding: gzip", CHUNKED, body=SMUGGLED), [501]),
    "as_it_is_and_chunked": (request(b"Transfer-Encoding: identity,\tchunked", body=SMUGGLED), [501]),
    "compressed_alone": (request(b"Transfer-Encoding: gzip", body=SMUGGLED), [400]),
    "chunks_of_http_1_0": (get(b"/liveness", CHUNKED, version=b"1.0") + SMUGGLED, [400]),
    "a_folded_header": (request(b"X: a\r\n b", LENGTH), [400]),
    "bare_line_feeds": (b"GET /liveness HTTP/1.1\nHost: x\n\n", [400]),
    "bare_carriage_returns": (b"GET /liveness HTTP/1.1\rHost: x\r\r", [400]),
    "a_chunk_of_negative_size": (request(CHUNKED, body=b"-1\r\n\r\n"), [400]),
    "a_chunk_beyond_numbers": (request(CHUNKED, body=b"f" * 20 + b"\r\n"), [400]),
    "a_chunk_with_line_feeds": (request(CHUNKED, body=b"1\nX\n0\n\n"), [400]),
    "a_chunk_longer_than_it_says": (request(CHUNKED, body=b"1\r\nXY\r\n0\r\n\r\n"), [400]),
    # What is not a request of ours.
    "a_zero_byte": (request(b"X: a\x00b", LENGTH), [400]),
    "a_control_character": (request(b"X\x01: a", LENGTH), [400]),
    "no_colon": (request(b"foo", LENGTH), [400]),
    "no_version": (b"GET /liveness\r\n\r\n", [505]),
    "http_2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "http_1_2": (get(b"/liveness", version=b"1.2"), [400]),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
    "no_host": (request(LENGTH, host=None), [400]),
    "two_hosts": (request(LENGTH, b"Host: y"), [400]),
    "an_unknown_method": (request(first=b"BREW /liveness HTTP/1.1", body=b""), [400]),
    "a_method_that_is_not_there": (request(first=b"PURGE /liveness HTTP/1.1", body=b""), [405]),
    "a_proxy_is_asked_for": (request(first=b"CONNECT evil:443 HTTP/1.1", body=b""), [400]),
    # Paths that another server may take for one of ours.
    "up_a_folder": (get(b"/v1/../liveness"), [404]),
    "up_a_folder_in_percent": (get(b"/%2e%2e/etc/passwd"), [404]),
    "two_slashes": (get(b"//liveness"), [404]),
    "a_slash_at_the_end": (get(b"/liveness/"), [404]),
    "a_zero_byte_in_the_path": (get(b"/liveness%00"), [404]),
    "a_line_end_in_the_path": (get(b"/x%0d%0aSet-Cookie:a"), [404]),
    "no_utf8_in_the_path": (get(b"/%ff%fe"), [404]),
    "no_ascii_in_the_path": (get("/ü".encode()), [400]),
    "no_slash": (get(b"liveness"), [400]),
    "the_server_itself": (request(first=b"OPTIONS * HTTP/1.1", body=b""), [404]),
    # Too much of something.
    "a_long_header": (get(b"/liveness", b"X: " + b"a" * 70_000), [431]),
    "a_header_without_end": (get(b"/liveness", b"X: " + b"a" * 700_000)[:-4], [431]),
    "many_headers": (get(b"/liveness", *[b"a: b"] * 20_000), [431]),
    "a_long_path": (get(b"/" + b"a" * 70_000), [431]),
    "trailers_without_end": (request(CHUNKED, body=b"0\r\n" + b"a: b\r\n" * 20_000), [431]),
    "a_trailer_without_end": (request(CHUNKED, body=b"1\r\nx\r\n0\r\nx: " + b"b" * 300_000), [431]),
    "a_chunk_extension_without_end": (request(CHUNKED, body=b"1;" + b"b" * 300_000), [431]),
    "a_large_body": (request(b"Content-Length: 20000000"), [413]),
    "large_chunks": (request(CHUNKED, body=b"100001\r\n" + b"[" * 0x100001 + b"\r\n" + b"200000\r\n"), [413]),
    "deep_json": (request(b"Content-Length: 200000", body=b"[" * 200_000), [400]),
    "many_requests_at_once": (get(b"/liveness") * 1000, [200] * 9),
    # What is unusual and right.
    "a_few_requests_at_once": (get(b"/liveness") * 5, [200] * 5),
    "nothing_follows_the_last": (get(b"/liveness", b"Connection: close") + get(b"/liveness"), [200]),
    "an_empty_coding_before_chunked": (request(b"Transfer-Encoding: ,CHUNKED", body=SMUGGLED), [400, 404]),
    "http_1_0": (get(b"/liveness", version=b"1.0"), [200]),
    "http_1_0_without_a_host": (request(first=b"GET /liveness HTTP/1.0", body=b"", host=None), [200]),
    "the_whole_address": (get(b"http://elsewhere/liveness"), [200]),
    "a_websocket": (get(b"/liveness", b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: a"), [200]),
    "http_2_if_you_like": (request(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", LENGTH), [404]),
    "and_another_behind": (request(b"Connection: Upgrade", b"Upgrade: h2c", LENGTH) + get(b"/liveness"), [404, 200]),
}


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def statuses(self) -> list[int]:
        """Returns the statuses of all answers until the end of the connection."""
        answers = await asyncio.wait_for(self.reader.read(), WAIT_S)
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


class Listening(Protocol):
    @property
    def port(self) -> int: ...


@asynccontextmanager
async def connected(gateway: Listening, num_clients: int = 1) -> AsyncIterator[list[Client]]:
    clients = []
    try:
        for _ in range(num_clients):
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", gateway.port)))
        yield clients
    finally:
        for client in clients:
            client.writer.transport.abort()


async def statuses_of(gateway: Listening, data: bytes) -> list[int]:
    async with connected(gateway) as (client,):
        client.send(data)
        return await client.statuses()


async def is_served(gateway: Listening) -> bool:
    return await statuses_of(gateway, get(b"/liveness", b"Connection: close")) == [200]


@pytest.fixture
async def gateway(redis: RedisClient, redis_url: str) -> AsyncIterator[Running]:
    await announce(redis)
    async with running_gateway(
        redis_url, header_timeout_s=0.5, body_timeout_s=1.0, idle_timeout_s=0.5, max_body_bytes=1 << 20
    ) as gateway:
        yield gateway


async def test_each_gets_a_status_and_others_are_served(gateway: Running) -> None:
    statuses = await asyncio.gather(*(statuses_of(gateway, data) for data, _ in REQUESTS.values()))
    assert dict(zip(REQUESTS, statuses, strict=True)) == {name: expected for name, (_, expected) in REQUESTS.items()}
    assert await is_served(gateway)


async def test_a_body_that_does_not_come_is_given_up(gateway: Running) -> None:
    async with connected(gateway) as (client,):
        client.send(request(b"Content-Length: 1000"))
        answering = asyncio.create_task(client.statuses())
        while not answering.done():
            client.send(b" ")
            await asyncio.sleep(0.02)
        assert await answering == [408]
    assert await is_served(gateway)


async def test_bytes_after_an_error_do_not_take_the_error_away(gateway: Running) -> None:
    assert await statuses_of(gateway, get(b"/liveness", b"X: " + b"a" * (8 << 20))) == [431]


@pytest.mark.parametrize("num_idle", [500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_idle_connections_keep_nobody_out(redis: RedisClient, redis_url: str, num_idle: int) -> None:
    async with running_gateway(redis_url, max_connections=200) as gateway, connected(gateway, num_idle) as idle:
        for client in idle:
            client.send(b"POST /v1/chat")
        assert await is_served(gateway)
        assert len(gateway.server.server_state.connections) <= 200 + NUM_ON_TOP


async def test_slow_bodies_keep_nobody_out(redis: RedisClient, redis_url: str) -> None:
    async with running_gateway(redis_url, max_connections=20) as gateway, connected(gateway, 60) as slow:
        for client in slow:
            client.send(request(b"Content-Length: 1000"))
        assert await is_served(gateway)


async def test_requests_with_a_few_wrong_bytes_harm_nobody(gateway: Running) -> None:
    random = Random(14)
    right = [data for data, expected in REQUESTS.values() if len(data) < 1000 and expected != [413]]

    def damaged() -> bytes:
        data = bytearray(random.choice(right))
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(data))
            wrong = random.choice((b"", b"\r", b"\n", b" ", b":", random.randbytes(1)))
            data[place : place + random.randint(0, 2)] = wrong
        return bytes(data)

    for _ in range(10):
        answers = await asyncio.gather(*(statuses_of(gateway, damaged()) for _ in range(50)))
        assert {status for statuses in answers for status in statuses} <= {
            200,
            400,
            404,
            405,
            408,
            411,
            413,
            431,
            501,
            505,
        }
        assert await is_served(gateway)
    await eventually(lambda: not gateway.server.server_state.connections)


async def test_memory_does_not_grow_with_what_strangers_send(redis_url: str, tmp_path: Path) -> None:
    limits = {"max_bodies_bytes": 32 << 20, "max_connections": 400, "body_timeout_s": 5, "header_timeout_s": 5}
    large = request(b"Content-Length: 4000000", body=b"[" + b"1," * 1_800_000)  # and no end
    async with GatewayProcess(redis_url, tmp_path / "log", **limits) as process:
        assert await is_served(process)
        before_mib = process.memory_mib
        async with connected(process, 300) as clients:
            for number, client in enumerate(clients):
                client.send((large, get(b"/" + b"a" * 60_000)[:-4], get(b"/liveness") * 1000)[number % 3])
            await asyncio.gather(*(client.writer.drain() for client in clients))
            assert await is_served(process)
            assert process.memory_mib - before_mib < 200  # bodies have 360 MB
            statuses = await asyncio.gather(*(client.statuses() for client in clients[::3]))
        assert {status for each in statuses for status in each} == {408, 503}
        assert await is_served(process)
