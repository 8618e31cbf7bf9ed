"""Connections that the Redis library makes with our settings, to real servers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import exceptions

from penstock.local.embedded import EmbeddedServer, dies_with_parent, find_servers
from penstock.protocol import keys
from penstock.protocol.errors import ConnectionLost, ServerRefused
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import (
    RedisClient,
    connect,
    connect_blocking,
    ensure_group,
    redis_errors,
)
from penstock.protocol.redis.faults import UNREACHABLE
from penstock.protocol.redis.streams import read_streams, stream_entries
from tests.support.programs.fakes import LossyProxy

pytestmark = [pytest.mark.versions, pytest.mark.every_server]

SECRET = "s3cr3t"
URLS_WITH_SECRET = [
    f"redis://user:{SECRET}@127.0.0.1:1/0",
    f"rediss://user:{SECRET}@127.0.0.1:1/0",
    f"unix://user:{SECRET}@/nonexistent/redis.sock",
    f"redis+cluster://user:{SECRET}@127.0.0.1:1",
    f"redis+sentinel://user:{SECRET}@127.0.0.1:1/main?sentinel_password={SECRET}",
]


async def test_it_connects_over_tcp_and_unix_socket(redis_server: EmbeddedServer, redis_url: str) -> None:
    for url in (redis_url, redis_server.socket_url):
        client = connect(url, decode=True, name="my-name")
        assert await client.ping()
        assert await client.client_getname() == "my-name"
        await client.aclose()


@pytest.mark.parametrize("url", URLS_WITH_SECRET)
async def test_an_unreachable_server_is_named_without_the_password(url: str) -> None:
    for client in (connect(url, decode=True, retries=0), connect_blocking(url, decode=True, block_s=1)):
        with pytest.raises(ConnectionLost) as caught, redis_errors(parse_url(url)):
            await client.ping()
        assert isinstance(caught.value, ConnectionError)
        assert str(parse_url(url)) in str(caught.value)
        assert SECRET not in str(caught.value) + repr(client) + repr(caught.value.__cause__)
        await client.aclose()


async def test_what_is_no_redis_is_as_good_as_away() -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak_http, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = connect(url, decode=True, retries=0)
        with pytest.raises(ConnectionLost, match="is not Redis"), redis_errors(parse_url(url)):
            await client.ping()
        await client.aclose()


async def test_a_wrong_password_is_refused_and_not_shown() -> None:
    with EmbeddedServer(arguments=("--requirepass", "right")) as server:
        for url in (server.url.replace("//", f"//:{SECRET}@"), server.url):
            client = connect(url, decode=True)
            with pytest.raises(ServerRefused) as caught, redis_errors(parse_url(url)):
                await client.ping()
            assert SECRET not in str(caught.value)
            await client.aclose()
        client = connect(server.url.replace("//", "//:right@"), decode=True)
        assert await client.ping()
        await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_both_protocols_read_streams_in_one_shape(redis: RedisClient, redis_url: str, protocol: int) -> None:
    await redis.xadd("a", {"f": "1"}, id="1-0")
    await redis.xadd("a", {"f": "2"}, id="1-1")
    await redis.xadd("b", {"f": "3"}, id="1-0")
    client = connect_blocking(f"{redis_url}?protocol={protocol}", decode=False, block_s=1)
    both = [
        (b"a", [(b"1-0", {b"f": b"1"}), (b"1-1", {b"f": b"2"})]),
        (b"b", [(b"1-0", {b"f": b"3"})]),
    ]
    assert await read_streams(client, {"a": "0-0", "b": "0-0"}, count=10, block_s=None) == both
    assert await read_streams(client, {"a": "1-0", "b": "1-0"}, count=10, block_s=0.01) == [(b"a", both[0][1][1:])]
    assert await read_streams(client, {"a": "1-1"}, count=10, block_s=0.01) == []
    await client.xgroup_create("a", "g", id="0")
    assert stream_entries(await client.xreadgroup("g", "me", {"a": ">"})) == both[:1]
    await client.xdel("a", "1-0")
    assert stream_entries(await client.xreadgroup("g", "me", {"a": "0"}))[0][1][0] == (b"1-0", {})
    await client.aclose()


async def test_a_blocking_connection_sends_nothing_twice(redis_server: EmbeddedServer, redis: RedisClient) -> None:
    await redis.xadd("s", {"f": "1"})
    await redis.xadd("s", {"f": "2"})
    await redis.xgroup_create("s", "g", id="0")
    async with LossyProxy(redis_server.port) as proxy:
        client = connect_blocking(proxy.url, decode=False, block_s=1)
        proxy.lose_next_answer_to(b"XREADGROUP")
        with pytest.raises(UNREACHABLE):
            await client.xreadgroup("g", "me", {"s": ">"}, count=1)
        assert proxy.num_lost == 1
        pending = await redis.xpending("s", "g")
        assert pending["pending"] == 1
        await client.aclose()


async def test_a_plain_connection_tries_again(redis_server: EmbeddedServer, redis: RedisClient) -> None:
    async with LossyProxy(redis_server.port) as proxy:
        client = connect(proxy.url, decode=False)
        proxy.lose_next_answer_to(b"INCR")
        assert await client.incr("counter") == 2  # it ran twice, so callers only send commands that may
        await client.aclose()


async def test_a_blocking_read_may_last_as_long_as_was_said(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocol.redis.connection.COMMAND_TIMEOUT_S", 0.2)
    client = connect_blocking(redis_url, decode=False, block_s=0.5)
    started = time.monotonic()
    assert await read_streams(client, {"nothing": "0-0"}, count=1, block_s=0.5) == []
    assert time.monotonic() - started > 0.45
    with pytest.raises(exceptions.TimeoutError):
        await client.xread({"nothing": "0-0"}, count=1, block=1500)
    monkeypatch.setattr("penstock.protocol.redis.streams.COMMAND_TIMEOUT_S", -0.3)
    with pytest.raises(exceptions.TimeoutError, match="no answer within"):
        await read_streams(client, {"nothing": "0-0"}, count=1, block_s=0.5)
    await client.aclose()


async def test_the_group_sees_what_was_queued_before_it(redis: RedisClient) -> None:
    await redis.xadd(keys.requests("q"), {"prompt": "early"})
    await ensure_group(redis, "q")
    await ensure_group(redis, "q")
    (group,) = await redis.xinfo_groups(keys.requests("q"))
    assert (group["name"], group["last-delivered-id"]) == (keys.GROUP, "0-0")
    await redis.set(keys.requests("not-a-stream"), "x")
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await ensure_group(redis, "not-a-stream")


async def test_a_swallowed_cancellation_takes_effect_after_the_command(redis_url: str) -> None:
    async def swallows() -> str:
        with redis_errors(parse_url(redis_url)), contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "went on"

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def sentinel_url(redis_server: EmbeddedServer, tmp_path: Path) -> Iterator[str]:
    """URL of a sentinel that watches the server."""
    with EmbeddedServer() as probe:
        port = probe.port
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\nsentinel monitor main 127.0.0.1 {redis_server.port} 1\n")
    program = next(iter(find_servers().values()))
    sentinel = subprocess.Popen(
        [*dies_with_parent(), str(program), str(config), "--sentinel"], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    yield f"redis+sentinel://127.0.0.1:{port}/main"
    sentinel.kill()
    sentinel.wait()


async def test_sentinel_leads_to_the_master(redis: RedisClient, sentinel_url: str) -> None:
    client = connect(sentinel_url, decode=True, retries=10)
    blocking = connect_blocking(sentinel_url, decode=False, block_s=1)
    await client.xadd("s", {"f": "1"}, id="1-1")
    assert await redis.xlen("s") == 1
    assert await read_streams(blocking, {"s": "0-0"}, count=1, block_s=1) == [(b"s", [(b"1-1", {b"f": b"1"})])]
    await client.aclose()
    await blocking.aclose()
    stranger = connect(sentinel_url.replace("main", "other"), decode=True, retries=0)
    with pytest.raises(ConnectionLost, match="other"), redis_errors(parse_url(sentinel_url)):
        await stranger.ping()
    await stranger.aclose()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_it_connects_over_tls(tmp_path: Path) -> None:
    program = find_servers().get("redis-server")
    if program is None:
        pytest.skip("needs a redis-server, which is built with TLS")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, [*command, *names], check=True, capture_output=True)
    with EmbeddedServer(program) as probe:
        tls_port = probe.port
    arguments = (
        "--tls-port",
        str(tls_port),
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
        "--tls-auth-clients",
        "no",
    )
    with EmbeddedServer(program, arguments=arguments):
        trusting = connect(f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={certificate}", decode=True)
        assert await trusting.ping()
        await trusting.aclose()
        doubting = connect(f"rediss://127.0.0.1:{tls_port}", decode=True, retries=0)
        with (
            pytest.raises(ConnectionLost, match=r"(?i)certificate"),
            redis_errors(parse_url(f"rediss://127.0.0.1:{tls_port}")),
        ):
            await doubting.ping()
        await doubting.aclose()


async def test_a_value_larger_than_a_socket_takes_arrives_whole(redis_server: EmbeddedServer, redis_url: str) -> None:
    value = bytes(range(256)) * (1 << 16)
    for url in (redis_url, redis_server.socket_url):
        client = connect(url, decode=False)
        await client.set("k", value)
        assert await client.get("k") == value
        await client.aclose()


async def test_commands_of_two_words_and_all_kinds_of_arguments_are_packed(redis_url: str) -> None:
    client = connect(redis_url, decode=True)
    assert await client.execute_command("CONFIG GET", "maxmemory") == {"maxmemory": "0"}
    await client.execute_command("RPUSH", "k", "ä", b"\x00\n", 7, 0.5)
    assert await client.lrange("k", 0, -1) == ["ä", "\x00\n", "7", "0.5"]
    await client.aclose()
