"""TLS to Redis: which servers are trusted, and files that are renewed while clients have connections."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hiredis import Reader

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.errors import BadAddress, ConnectionLost
from penstock.protocol.redis import tls
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import connect, redis_errors
from tests.support.programs.gateway_harness import Certificate
from tests.support.redis_servers.servers import cluster_arguments, form_cluster
from tests.support.redis_servers.tls_proxy import TlsProxy


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Certificate]:
    return [Certificate.made_in(tmp_path_factory.mktemp("tls")) for _ in range(3)]


async def ping(url: str) -> bool:
    async with aclosing(connect(url, decode=True, retries=0)) as client:
        with redis_errors(parse_url(url)):
            return bool(await client.ping())


@asynccontextmanager
async def sentinel_of(port: int) -> AsyncIterator[int]:
    """Listens as a sentinel that knows a server at `port`; gives the sentinel's port."""
    state = ["name", "main", "ip", "127.0.0.1", "port", str(port), "flags", "master", "num-other-sentinels", "0"]
    answer = f"*1\r\n*{len(state)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in state)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = Reader()
        while data := await reader.read(4096):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                writer.write(answer.encode() if command[0].upper() == b"SENTINEL" else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("at_server", "at_sentinels"), list(itertools.product([False, True], repeat=2)))
async def test_server_and_sentinels_speak_tls_each_for_themselves(
    redis_server: EmbeddedServer, certificates: list[Certificate], at_server: bool, at_sentinels: bool
) -> None:
    (certificate, *_) = certificates
    async with (
        TlsProxy(redis_server.port, certificate) as server,
        sentinel_of(server.port if at_server else redis_server.port) as plain,
        TlsProxy(plain, certificate) as sentinel,
    ):
        scheme = "rediss" if at_server else "redis"
        options = [f"sentinel_tls={str(at_sentinels).lower()}"] if at_sentinels is not at_server else []
        options += [f"ssl_ca_certs={certificate.file}"] if at_server or at_sentinels else []
        port = sentinel.port if at_sentinels else plain
        assert await ping(f"{scheme}+sentinel://127.0.0.1:{port}/main?{'&'.join(options)}")
        assert (server.num_links > 0, sentinel.num_links > 0) == (at_server, at_sentinels)


async def test_a_cluster_speaks_it_at_each_node(certificates: list[Certificate]) -> None:
    (certificate, *_) = certificates
    with EmbeddedServer(arguments=cluster_arguments()) as server:
        await asyncio.to_thread(form_cluster, [server])
        async with TlsProxy(server.port, certificate) as proxy:
            async with aclosing(connect(server.url, decode=True)) as plain:
                await plain.config_set("cluster-announce-port", proxy.port)
            assert await ping(f"rediss+cluster://127.0.0.1:{proxy.port}?ssl_ca_certs={certificate.file}")
            assert proxy.num_links > 0


def test_what_the_url_says_of_sentinels() -> None:
    def said(address: Address) -> tuple[bool, bool]:
        return address.tls, address.sentinel_tls

    assert said(parse_url("redis+sentinel://s/main")) == (False, False)
    assert said(parse_url("rediss+sentinel://s/main")) == (True, True)
    assert said(parse_url("rediss+sentinel://s/main?sentinel_tls=False")) == (True, False)
    assert said(parse_url("redis+sentinel://s/main?ssl_cert_reqs=none&sentinel_tls=true")) == (False, True)
    for wrong in ("rediss://s?sentinel_tls=true", "redis+sentinel://s/main?sentinel_tls=2",
                  "redis+sentinel://s/main?ssl_cert_reqs=none&sentinel_tls=false"):  # fmt: skip
        with pytest.raises(BadAddress):
            parse_url(wrong)


class Files:
    """Files that a URL names, and that others replace."""

    def __init__(self, folder: Path, server: Certificate, client: Certificate) -> None:
        self.authority, self.certificate, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        for path, source in zip(
            (self.authority, self.certificate, self.key), (server.file, client.file, client.key), strict=True
        ):
            self.replace(path, source)

    def replace(self, path: Path, source: Path) -> None:
        shutil.copy(source, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def url(self, port: int) -> str:
        files = f"ssl_ca_certs={self.authority}&ssl_certfile={self.certificate}&ssl_keyfile={self.key}"
        return f"rediss://127.0.0.1:{port}?{files}"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_files_that_were_renewed_are_those_of_new_connections(
    redis_server: EmbeddedServer,
    certificates: list[Certificate],
    tmp_path: Path,
    order: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new, client_s = certificates
    files = Files(tmp_path, old, old)
    changes = [(files.authority, new.file), (files.certificate, client_s.file), (files.key, client_s.key)]
    async with TlsProxy(redis_server.port, old, clients=old.file) as proxy:
        client: Any = connect(files.url(proxy.port), decode=True, retries=3)
        async with aclosing(client):
            held = await client.connection_pool.get_connection()
            for at in order:
                files.replace(*changes[at])
                for _ in range(2):  # a pair that does not fit is said once
                    tls.look_again()
                await held.send_command("PING")
                assert await held.read_response() == "PONG"
            await client.connection_pool.release(held)
            await proxy.show(new, clients=client_s.file)
            proxy.cut()
            assert await client.ping()
    half = abs(order.index(1) - order.index(2))  # looks between the two of the pair
    assert caplog.text.count("cannot be used") == half


async def test_a_client_goes_on_with_what_it_had(
    redis_server: EmbeddedServer, certificates: list[Certificate], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old, new, _ = certificates
    files = Files(tmp_path, old, old)
    whole = old.key.read_bytes()
    async with (
        TlsProxy(redis_server.port, old, clients=old.file) as proxy,
        aclosing(connect(files.url(proxy.port), decode=True)) as client,
    ):
        assert await client.ping()
        for harm in (b"", whole[: len(whole) // 2], new.key.read_bytes(), None):
            caplog.clear()
            files.key.unlink() if harm is None else files.key.write_bytes(harm)
            for _ in range(3):
                proxy.cut()
                assert await client.ping()
            assert caplog.text.count(f"{files.key} cannot be used") == 1
        files.key.write_bytes(whole)
        proxy.cut()
        assert await client.ping()
        assert f"uses the renewed files: {files.authority}, {files.certificate}, {files.key}" in caplog.text


async def test_an_authority_that_is_not_trusted_is_refused(
    redis_server: EmbeddedServer, certificates: list[Certificate]
) -> None:
    async with TlsProxy(redis_server.port, certificates[0]) as proxy:
        with pytest.raises(ConnectionLost, match=r"(?i)certificate"):
            await ping(f"rediss://127.0.0.1:{proxy.port}?ssl_ca_certs={certificates[1].file}")
        assert await ping(f"rediss://127.0.0.1:{proxy.port}?ssl_cert_reqs=none")
