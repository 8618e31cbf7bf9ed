"""TLS, and clients that do not speak it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import Certificate, Running, running_gateway

FOREVER_S = 1000.0
ASKING = b"GET /liveness HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.made_in(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving(redis_url: str, certificate: Certificate, **settings: Any) -> AsyncIterator[Running]:
    files: dict[str, Any] = {"tls_certificate": certificate.file, "tls_key": certificate.key}
    async with running_gateway(redis_url, **files, **settings) as gateway:
        yield gateway


@asynccontextmanager
async def connected(
    gateway: Running, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(gateway: Running, tls: ssl.SSLContext | None, data: bytes = ASKING) -> bytes:
    """Returns all that comes until the connection ends."""
    async with connected(gateway, tls) as (reader, writer):
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), WAIT_S)
        except ConnectionResetError:
            return b""


async def test_requests_and_refusals_come_through(redis: RedisClient, redis_url: str, certificate: Certificate) -> None:
    async with serving(redis_url, certificate) as gateway:
        answers = await asyncio.gather(*(answer(gateway, certificate.trusted()) for _ in range(20)))
        assert {each.split(b"\r\n")[0] for each in answers} == {b"HTTP/1.1 200 OK"}
        long = b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n"
        assert (await answer(gateway, certificate.trusted(), long)).startswith(b"HTTP/1.1 431 ")
        await eventually(lambda: not gateway.server.server_state.connections)
        assert not gateway.server.config.places.waiting


async def test_what_is_no_tls_is_closed(redis: RedisClient, redis_url: str, certificate: Certificate) -> None:
    async with serving(redis_url, certificate) as gateway:
        assert b"HTTP" not in await answer(gateway, None)
        with pytest.raises(ssl.SSLError):
            await answer(gateway, ssl.create_default_context())  # a client that does not trust it ends the handshake
        await eventually(lambda: not gateway.server.config.places.waiting)
        assert (await answer(gateway, certificate.trusted())).startswith(b"HTTP/1.1 200 ")


async def test_a_handshake_that_never_comes_ends_the_connection(
    redis: RedisClient, redis_url: str, certificate: Certificate
) -> None:
    async with serving(redis_url, certificate, header_timeout_s=0.1) as gateway:
        assert await answer(gateway, None, b"") == b""


@pytest.mark.parametrize("order", [("file", "key"), ("key", "file")])
async def test_a_pair_that_is_renewed_one_by_one_is_shown_once_it_fits(
    redis: RedisClient, redis_url: str, tmp_path: Path, order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocol.redis.renewal.LOOK_S", 0.01)
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    old, new = map(Certificate.made_in, folders)
    before, after = old.trusted(), new.trusted()
    ask = b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n"
    with capture_logs() as logs:
        async with serving(redis_url, old) as gateway, connected(gateway, before) as (reader, writer):
            for which in order:
                assert (await answer(gateway, before)).startswith(b"HTTP/1.1 200 ")
                getattr(new, which).replace(getattr(old, which))
                event = "certificate_refused" if which == order[0] else "certificate_renewed"
                await eventually(lambda event=event: [line for line in logs if line["event"] == event])
                for _ in range(3):
                    gateway.server._renew()
            assert (await answer(gateway, after)).startswith(b"HTTP/1.1 200 ")
            with pytest.raises(ssl.SSLError):
                await answer(gateway, before)
            writer.write(ask)  # its connection is older than all that
            assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 200 ")
    said = [line["event"] for line in logs if line["event"].startswith("certificate")]
    assert said == ["certificate_refused", "certificate_renewed"]


async def test_those_who_wait_with_it_keep_nobody_out(
    redis: RedisClient, redis_url: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serving.http.places.NUM_KEPT", 0)
    async with (
        serving(redis_url, certificate, header_timeout_s=FOREVER_S, max_connections=10) as gateway,
        AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(connected(gateway)) for _ in range(40)]
        for reader, _ in idle[:30]:
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        assert (await answer(gateway, certificate.trusted())).startswith(b"HTTP/1.1 200 ")
        assert len(gateway.server.config.places.waiting) <= 10
